"""Steps that check the staged version before it is published."""

from __future__ import annotations

from exporter.graph.lookup_tables import table_geometries
from exporter.jobs.runner import Runner
from exporter.options import Verify
from exporter.pipeline.staged import Staged
from exporter.publish.finite import require_base_finite
from exporter.publish.manifest import tensor_entries
from exporter.verify.outputs import Probe, Running, compare_outputs, require_golden
from exporter.verify.table_index import verify_tables
from exporter.verify.version_files import verify_bytes, verify_files


def check_staged(staged: Staged) -> None:
    """Check files, bytes, indexes of tables and outputs against the checkpoint, to the extent of `--verify`.

    VerificationError for a difference; differences of outputs within the tolerance are recorded in `staged`.
    """
    planned, catalog = staged.plan, staged.variables.catalog
    request, layout = planned.request, planned.layout
    if request.verify.includes(Verify.FILES):
        verify_files(staged.bundle, tensor_entries(catalog))
    if request.verify.includes(Verify.BYTES):
        with staged.progress("verify", catalog.bytes_) as bar:
            verify_bytes(catalog, runner=Runner.of(request.jobs), progress=bar)
    if layout is not None and request.verify is not Verify.NONE:
        verify_tables(layout, catalog, is_filtered=not planned.admission.is_everyone)
    if request.verify.includes(Verify.OUTPUTS):
        staged.differences = compare_outputs(
            planned.source,
            planned.mapping,
            staged.bundle,
            requests=[Probe(each.signature, each.inputs) for each in planned.probes or planned.warmup],
            tolerance=request.tolerance,
            traced_rows=planned.graph.traced_rows,
            tables=table_geometries(planned.graph),
            running=_running(staged),
        )


def check_published(staged: Staged) -> None:
    """Check the values that servers get, including increments: finite, and as golden requests expect.

    NotFinite or VerificationError if they are not.
    """
    request = staged.plan.request
    if request.updates and request.updates.finite and request.verify.includes(Verify.BYTES):
        require_base_finite(staged.variables.catalog)
    require_golden(staged.bundle, staged.plan.golden, _running(staged))


def _running(staged: Staged) -> Running:
    """The settings for running graphs: in this process only if the user allowed code or loads operations."""
    planned = staged.plan
    trusted = planned.source.trust.code or bool(planned.graph.foreign)
    return Running(staged.variables.catalog.bytes_, trusted)
