"""The step that writes `variables/`."""

from __future__ import annotations

from msgspec.structs import replace

from exporter.bundle.variables import as_rewritten, write_variables
from exporter.checkpoint.tensor_bundle import write_bundle
from exporter.errors import LinkRefused
from exporter.jobs.runner import Runner
from exporter.options import DataMode
from exporter.pipeline.staged import Staged
from exporter.pipeline.table_layout import write_tables
from exporter.publish.versions import is_trusting


def write_values(staged: Staged) -> None:
    """Write `variables/`; a checkpoint that is not a tensor bundle is first converted into one.

    Raises:
        CheckpointChanged: the trainer removed or replaced files since the plan was made.
        LinkRefused: links are asked for, and the checkpoint is not a tensor bundle.
    """
    request, catalog = staged.plan.request, staged.plan.catalog
    data, runner = (
        staged.plan.data,
        Runner.of(request.jobs, request.out, resumes=not is_trusting(request.out)),
    )
    indexer = runner
    if not catalog.is_bundle:
        if data is DataMode.LINK:
            raise LinkRefused(f"{catalog.prefix} is not a tensor bundle: its bytes have to be rewritten")
        _convert(staged)
        # The new bundle is only on this machine, so its keys are indexed here, too.
        data, indexer = DataMode.AUTO, Runner(task_bytes=runner.task_bytes)
    index_tasks, index_bytes = _write_indexes(staged, indexer)
    # Indexes first: they are sources of this mapping, linked like the checkpoint's own shards.
    with staged.progress("variables", staged.plan.mapping.bytes_) as bar:
        made = staged.bundle.parent
        variables = write_variables(
            staged.plan.mapping, staged.bundle, data=data, runner=runner, made=made, progress=bar
        )
    if variables.job is not None:
        staged.jobs.push(variables.job)
    tasks, size = variables.work
    variables = replace(variables, work=(tasks + index_tasks, size + index_bytes))
    if not catalog.is_bundle:
        variables = as_rewritten(variables, catalog.prefix, catalog.family)
    staged.variables, staged.mapping = variables, staged.plan.mapping
    # After the last read: a shard that was replaced while it was linked or copied is not published.
    staged.plan.checkpoint.require_same_files()


def _write_indexes(staged: Staged, runner: Runner) -> tuple[int, int]:
    """Write the indexes of dynamic tables; return the number of tasks, and the bytes that they read."""
    layout, admission = staged.plan.layout, staged.plan.admission
    if layout is None:
        return 0, 0
    work = layout.index_job(admission, runner.task_bytes).size_of_work
    with staged.progress("indexes", work[1]) as bar:
        tables = write_tables(layout, staged.plan.mapping, admission, staged.scratch("tables"), runner, bar)
    staged.jobs.push(tables.job)
    tables.job.keep_until_stored(staged.plan.request.out)
    staged.plan = replace(staged.plan, mapping=tables.mapping)
    return work


def _convert(staged: Staged) -> None:
    """Write the tensors that the mapping needs from an archive into a bundle beside the staged one; map from
    there.
    """
    mapping, layout = staged.plan.mapping, staged.plan.layout
    laid_out = layout.shapes if layout is not None else {}
    # By name: one tensor may be served with a cast, and kept without it for a training graph.
    needed = {item.tensor.name: item.tensor for item in mapping.sources if item.tensor.name not in laid_out}
    if layout is not None:
        needed |= {name: staged.plan.catalog.tensors[name] for name in layout.stored_names}
    with staged.progress("read", sum(ref.bytes_ for ref in needed.values())) as bar:
        prefix = staged.scratch("source") / "model.ckpt"
        catalog = write_bundle(staged.plan.catalog, needed.values(), prefix, bar)
    if layout is not None:
        layout = layout.with_source(catalog)
        catalog = layout.catalog
    staged.plan = replace(staged.plan, mapping=mapping.over(catalog), layout=layout)
