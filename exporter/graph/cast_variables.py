"""Store a variable as bfloat16 or float16 and compute with it in the graph's own dtype.

A `ReadVariableOp` or `ResourceGather` of such a variable yields the stored dtype, and a `Cast` gets its old
name, so no node that uses it changes. Gathers cast only the gathered rows.

A table in int8 has scales behind its codes (`exporter.wire.int8_codes`): a gather yields rows of both, which
are split, and multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from msgspec import Struct

from exporter.errors import MappingError
from exporter.graph.changed_uses import INDIFFERENT, become_shape, change_uses, rename_output
from exporter.graph.nodes import Body, attr, attr_shape, base_dtype, free_name
from exporter.wire.dtypes import DType
from exporter.wire.int8_codes import SCALE_BYTES
from exporter.wire.protos import Proto

_READS = {"ReadVariableOp": "value", "ResourceGather": "output", "ResourceGatherNd": "output"}


class _Cast(Struct, frozen=True):
    """A variable's change: its node (for messages), the graph's dtype, the stored one, and its shape."""

    variable: str
    wanted: DType
    stored: DType
    shape: tuple[int, ...] = ()
    extra_handles: tuple[str, ...] = ()

    @property
    def is_in_8_bits(self) -> bool:
        """True if the variable is stored in int8, as codes and scales, with longer rows than the graph's."""
        return self.stored is DType.INT8

    def apply(self, body: Body, node: Proto, extra_handles: Sequence[str]) -> None:
        """Change, in place, a node that takes the variable's handle so that its readers get the old dtype.

        A node that asks only for the shape or state may stay. `extra_handles` is not used. MappingError for a
        node that does anything else than read, and for a read of a variable in int8 that does not gather rows
        of a matrix; GraphError for an unknown type number.
        """
        if self.is_in_8_bits and node.op == "VariableShape":
            become_shape(body, node, self.shape)
        elif node.op in INDIFFERENT:
            return
        elif node.op not in _READS:
            raise self.refusal(node)
        elif self.is_in_8_bits:
            _multiply_rows(body, node, self)
        else:
            _cast_read(body, node, self)

    def refusal(self, node: Proto) -> MappingError:
        """Return the error that names a node which takes the handle and cannot be changed."""
        return MappingError(
            f"variable {self.variable!r} cannot be cast to {self.stored.label}: "
            f"node {node.name!r} ({node.op}) takes its handle",
            cause="only reads, gathers and calls of functions of the same graph can be changed to another "
            "dtype",
            hint="leave that variable out of --cast",
        )

    def returned(self, function: str) -> MappingError:
        """Return the error that names a function which returns the handle."""
        return MappingError(
            f"variable {self.variable!r} cannot be cast: function {function!r} returns its handle",
            hint="leave that variable out of --cast",
        )


def cast_variables(graph_def: Proto, stored: Mapping[str, DType]) -> None:
    """Store variables in the dtypes of `stored` ({VarHandleOp: dtype}), in place, and cast them when read.

    Variables that `stored` lacks, or that have the dtype already, are not changed; names in it that the graph
    lacks are ignored. In int8 a row gets longer by its scale, of 4 bytes. After an error the graph may be
    changed in part.

    Raises:
        MappingError: a handle reaches a node that cannot be served in another dtype, such as an assignment.
        GraphError: a node has an unknown type number.
    """
    handles = {}
    for node in graph_def.node:
        wanted = base_dtype(node.attr["dtype"].type) if node.op == "VarHandleOp" else None
        if wanted is not None and wanted != stored.get(node.name, wanted):
            cast = _Cast(node.name, wanted, stored[node.name], attr_shape(node) or ())
            handles[node.name] = cast
            node.attr["dtype"].type = int(cast.stored)
            if cast.is_in_8_bits:
                node.attr["shape"].shape.dim[-1].size += SCALE_BYTES
    change_uses(graph_def, handles)


def _cast_read(body: Body, node: Proto, cast: _Cast) -> None:
    """Let a read yield the stored dtype under a new name, and add a Cast with its old name.

    The Cast gives the graph's dtype.
    """
    output_name, output = node.name, _READS[node.op]
    body.rename(node, next(new for n in count() if (new := f"{output_name}/stored_{n}") not in body.by_name))
    node.attr["dtype"].type = int(cast.stored)
    stored = body.single(node, output)
    body.add(output_name, "Cast", stored, device=node.device, SrcT=cast.stored, DstT=cast.wanted)
    if body.function is not None:
        rename_output(body.function, f"{output_name}:{output}:", f"{output_name}:y:")


def _multiply_rows(body: Body, node: Proto, cast: _Cast) -> None:
    """Let a gather yield codes and scales under a new name, and give its old name to their product.

    The product is in the graph's dtype; the nodes that compute it are added to `body`. MappingError unless
    the node is a ResourceGather of rows of a matrix.
    """
    if node.op != "ResourceGather" or attr(node, "batch_dims").i or len(cast.shape) != 2:
        raise cast.refusal(node)
    name, output = node.name, _READS[node.op]
    body.rename(node, free_name(body.by_name, f"{name}/stored"))
    node.attr["dtype"].type = int(DType.INT8)
    node.attr.pop("_output_shapes", None)

    def add(name: str, op: str, *inputs: str, **attrs: Any) -> Proto:
        return body.add(name, op, *inputs, device=node.device, **attrs)

    stored = body.single(node, output)
    sizes = body.constant_beside(node, f"{name}/sizes", [cast.shape[-1], SCALE_BYTES])
    axis = body.constant_beside(node, f"{name}/axis", -1)
    parts = add(f"{name}/parts", "SplitV", stored, sizes, axis, T=DType.INT8, Tlen=DType.INT32, num_split=2)
    codes, bits = (body.output(parts, number) for number in range(2))
    scale = body.single(add(f"{name}/scale", "Bitcast", bits, T=DType.INT8, type=DType.FLOAT), "output")
    column = add(f"{name}/column", "ExpandDims", scale, axis, T=DType.FLOAT, Tdim=DType.INT32)
    values = add(f"{name}/codes", "Cast", codes, SrcT=DType.INT8, DstT=DType.FLOAT)
    factors = body.single(values, "y"), body.single(column, "output")
    if cast.wanted is DType.FLOAT:
        add(name, "Mul", *factors, T=DType.FLOAT)
        last = "z"
    else:
        product = add(f"{name}/rows", "Mul", *factors, T=DType.FLOAT)
        add(name, "Cast", body.single(product, "z"), SrcT=DType.FLOAT, DstT=cast.wanted)
        last = "y"
    if body.function is not None:  # whose readers name the output, as the OpDef of the last operation does
        rename_output(body.function, f"{name}:{output}:", f"{name}:{last}:")
