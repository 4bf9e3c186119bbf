"""What is checked of a staged version: `--verify`."""

from __future__ import annotations

from pathlib import Path

from exporter.bundle.variables import VariablesReport
from exporter.jobs.runner import Runner
from exporter.options import Verify
from exporter.pipeline.full_plan import Plan
from exporter.progress import ProgressFactory
from exporter.publish.manifest import tensor_entries
from exporter.verify.outputs import Difference, Request, compare_outputs
from exporter.verify.table_index import verify_tables
from exporter.verify.version_files import verify_bytes, verify_files


def check_staged(
    planned: Plan, bundle: Path, variables: VariablesReport, progress: ProgressFactory
) -> tuple[Difference, ...]:
    """Check as much as was asked for; how far outputs differ, if they were compared.

    Raises:
        VerificationError, CheckpointError: what is wrong.
    """
    request = planned.request
    if request.verify.includes(Verify.FILES):
        verify_files(bundle, tensor_entries(variables.catalog))
    if request.verify.includes(Verify.BYTES):
        with progress("verify", variables.catalog.bytes_) as bar:
            runner = Runner.of(request.jobs)
            verify_bytes(variables.catalog, runner=runner, progress=bar)
    if planned.layout is not None and request.verify is not Verify.NONE:
        is_filtered = not planned.rules.admission.is_everyone
        verify_tables(planned.layout, variables.catalog, is_filtered=is_filtered)
    if not request.verify.includes(Verify.OUTPUTS):
        return ()
    probes = [Request(probe.signature, probe.inputs) for probe in planned.probes or planned.warmup]
    return compare_outputs(
        planned.source,
        planned.mapping,
        bundle,
        requests=probes,
        tolerance=request.tolerance,
        traced_rows=planned.graph.traced_rows,
        tables=planned.layout.geometries if planned.layout else None,
    )
