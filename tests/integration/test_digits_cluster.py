"""What the digits cluster leaves behind is what the rest of the suite takes it for."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from exporter.catalog import TensorRef
from exporter.checkpoint.tensor_bundle import read_catalog
from tests.support.clusters import DigitsTraining


@pytest.fixture(scope="module")
def prefix(digits: DigitsTraining) -> Path:
    state = (digits.checkpoints / "checkpoint").read_text()
    return digits.checkpoints / state.split('"')[1]


@pytest.fixture(scope="module")
def tensors(prefix: Path) -> Mapping[str, TensorRef]:
    return read_catalog(prefix).tensors


@pytest.mark.landing
def test_the_network_has_learnt(digits: DigitsTraining) -> None:
    labels = digits.expected["labels"]
    for scores in (digits.expected["scores"], digits.expected["scores_ema"]):
        assert (scores.argmax(axis=1) == labels).mean() > 0.95


@pytest.mark.landing
def test_the_last_checkpoint_is_of_the_step_that_the_scores_are_from(
    digits: DigitsTraining, prefix: Path
) -> None:
    step = int(digits.expected["step"])
    assert step >= 300
    assert prefix.name == f"model.ckpt-{step}"


@pytest.mark.landing
def test_each_parameter_server_wrote_a_shard(prefix: Path) -> None:
    catalog = read_catalog(prefix)
    assert [shard.name for shard in catalog.shards] == [
        f"{prefix.name}.data-{shard:05d}-of-00002" for shard in range(2)
    ]
    assert min(catalog.shard_sizes) > 500_000


@pytest.mark.landing
def test_the_partitioned_weight_lies_in_slices_on_both(tensors: Mapping[str, TensorRef]) -> None:
    for suffix in ("", "/Adam", "/Adam_1", "/ExponentialMovingAverage"):
        kernel = tensors[f"digits/hidden/kernel{suffix}"]
        assert kernel.shape == (1024, 128)
        assert {part.spec.starts for part in kernel.slices} == {(0, 0), (512, 0)}
        assert {part.extent.shard for part in kernel.slices if part.extent} == {0, 1}


@pytest.mark.landing
def test_training_left_more_than_inference_needs(tensors: Mapping[str, TensorRef]) -> None:
    weights = {
        name.removesuffix("/ExponentialMovingAverage") for name in tensors if name.endswith("MovingAverage")
    }
    slots = {f"{weight}/{slot}" for weight in weights for slot in ("Adam", "Adam_1")}
    statistics = {f"digits/norm{n}/moving_{what}" for n in (1, 2) for what in ("mean", "variance")}
    averages = {f"{weight}/ExponentialMovingAverage" for weight in weights}
    others = {"global_step", "beta1_power", "beta2_power"}
    assert len(weights) == 10
    assert set(tensors) == weights | slots | averages | statistics | others


@pytest.mark.landing
def test_summaries_were_written(digits: DigitsTraining) -> None:
    (events,) = digits.checkpoints.glob("events.out.tfevents.*")
    assert b"loss" in events.read_bytes()


@pytest.mark.landing
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize(("answer", "suffix"), [("scores", ""), ("scores_ema", "/ExponentialMovingAverage")])
def test_the_stock_saver_restores_the_served_graph_to_the_expected_scores(
    digits: DigitsTraining,
    prefix: Path,
    tensors: Mapping[str, TensorRef],
    answer: str,
    suffix: str,
    parts: int,
) -> None:
    """However the weight is partitioned; statistics of batch norm have no averages."""

    def stored_name(variable: str) -> str:
        return variable + suffix if variable + suffix in tensors else variable

    outputs = _restored(prefix, digits.expected["images"], stored_name, parts)

    assert np.abs(outputs["scores"] - digits.expected[answer]).max() <= 1e-6
    assert (outputs["digits"] == digits.expected[answer].argmax(axis=1)).all()


def _restored(
    prefix: Path, images: NDArray[np.float32], stored_name: Callable[[str], str], parts: int
) -> dict[str, NDArray]:
    """What `serving_default` answers with values that the stock Saver restored."""
    import tensorflow as tf

    from examples.digits.model import serving

    with tf.Graph().as_default():
        inputs, outputs = serving(parts)["serving_default"]
        variables: dict[str, Any] = {}
        for variable in tf.compat.v1.global_variables():
            whole, part = re.fullmatch(r"(.*?)(/part_\d+)?", variable.op.name).groups()
            if part:
                variables.setdefault(stored_name(whole), []).append(variable)
            else:
                variables[stored_name(whole)] = variable
        with tf.compat.v1.Session() as session:
            tf.compat.v1.train.Saver(variables).restore(session, str(prefix))
            return session.run(outputs, {inputs["images"]: images})
