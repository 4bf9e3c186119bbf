"""The files that take longest, by their time: they begin first, so that all processes end together.

pytest-xdist hands files out as they come (with --no-loadscope-reorder); by default those of many tests go
first, and the longest have few. Files that make the same things first, as guides do, stand apart: none
waits for another.
"""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
LONGEST = (
    "integration/test_agent_canary.py",
    "jobs/test_engines.py",
    "guides/test_trainers.py",
    "integration/test_examples.py",
    "guides/test_serve.py",
    "integration/test_agent.py",
    "integration/test_families_archives.py",
    "pipeline/test_incremental_tables.py",
    "integration/test_agent_rebuild.py",
    "pipeline/test_8_bit_tables_by_keys.py",
    "guides/test_training.py",
    "integration/test_server_process.py",
    "integration/test_status_page.py",
    "integration/test_delta_crash_points.py",
    "training/test_training_export.py",
    "guides/test_production.py",
    "integration/test_increments_cluster.py",
    "increments/test_trained_increments.py",
    "guides/test_follow.py",
    "integration/test_server_network.py",
    "integration/test_agent_port.py",
    "guides/test_export.py",
    "tables/test_table_serving.py",
    "integration/test_families_served.py",
    "integration/test_incremental_export.py",
    "transfer/test_two_publishers.py",
    "subgraph/test_incremental_callers.py",
    "integration/test_faults.py",
    "integration/test_families_object.py",
    "guides/test_scripts.py",
    "pipeline/test_incremental_pipeline.py",
    "pipeline/test_same_graph.py",
    "tables/test_table_growth.py",
    "pipeline/test_republish.py",
    "subgraph/test_incremental_graphs.py",
    "checkpoint/test_keras_archive.py",
    "training/test_training_meanwhile.py",
    "mapping/test_permuted_layers.py",
    "checkpoint/test_foreign_files.py",
    "storage/test_store_faults.py",
    "jobs/test_jobs_in_stores.py",
    "test_deploy.py",
    "integration/test_crash_points.py",
    "integration/test_mirrored_cluster.py",
    "test_fuzz.py",
    "cli/test_lost_output.py",
    "integration/test_chaos.py",
    "integration/test_agent_tls.py",
    "integration/test_agent_meets.py",
    "graph/test_training_mode.py",
    "pipeline/test_again.py",
    "agent/test_agent_audit.py",
    "integration/test_follow_training.py",
)


def longest_first(items: list[pytest.Item]) -> None:
    """Sort tests by their file's place in `LONGEST`; those of other files stay behind, in their order.

    Raises:
        pytest.UsageError: a file is there no more.
    """
    places = {TESTS / name: place for place, name in enumerate(LONGEST)}
    if gone := [path for path in places if not path.is_file()]:
        raise pytest.UsageError(f"{gone[0]} is not there: name what took its place in {__file__}")
    items.sort(key=lambda item: places.get(item.path, len(places)))
