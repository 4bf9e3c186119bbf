"""TF Serving's flags on the command line of `serve-model run`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from exporter.errors import UsageError
from serving.cli import app
from serving.stock_flags import STOCK_FLAGS, Treatment, translate
from tests.support.commands import run_app

ROOT = Path(__file__).parents[2]


def options_of_run() -> dict[str, Any]:
    command = typer.main.get_command(app).commands["run"]
    return {name: parameter for parameter in command.params for name in parameter.opts}


@pytest.mark.parametrize("flag", STOCK_FLAGS, ids=lambda flag: flag.name)
def test_what_means_the_same_is_an_option(flag: Any) -> None:
    if flag.treatment is not Treatment.SAME:
        assert flag.why, "a reader wants to know why"
        return
    option = flag.option_if_false or flag.own
    assert option in options_of_run()
    assert getattr(options_of_run()[option], "is_flag", False) is flag.is_boolean


def test_flags_are_listed_once() -> None:
    names = [flag.name for flag in STOCK_FLAGS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("typed", "parsed"),
    [
        (["--port=8500"], ["--port=8500"]),
        (["--port", "8500"], ["--port", "8500"]),
        (["models/ranker", "--model-name", "x"], ["models/ranker", "--model-name", "x"]),
        (["--model_base_path=/models/a_b"], ["--model-base-path=/models/a_b"]),
        (["--file_system_poll_wait_seconds=5"], ["--poll-seconds=5"]),
        (["--file-system-poll-wait-seconds=5"], ["--poll-seconds=5"]),
        (["--grpc_max_threads=3"], ["--threads=3"]),
        (["--poll_seconds=5"], ["--poll-seconds=5"]),
        (["--model_name=a=b"], ["--model-name=a=b"]),
        (["--enable_signature_method_name_check"], ["--enable-signature-method-name-check"]),
        (["--enable_signature_method_name_check=true"], ["--enable-signature-method-name-check"]),
        (["--enable_signature_method_name_check=false"], []),
        (["--enable_model_warmup=false"], ["--no-model-warmup"]),
        (["--enable_model_warmup"], []),
        (["--use_alts_credentials=false"], []),
        (["--platform_config_file="], []),
        (["--enable_batching=false", "--batching_parameters_file="], []),
        (["--", "--model_name=x"], ["--", "--model_name=x"]),
        (["-q", "m"], ["-q", "m"]),
    ],
)
def test_translation(typed: list[str], parsed: list[str]) -> None:
    assert translate(typed) == (parsed, [])


def test_what_has_no_effect_is_said() -> None:
    parsed, notes = translate(["--enable_batching=true", "--num_load_threads=4", "m"])
    assert parsed == ["m"]
    assert [note.partition(":")[0] for note in notes] == [
        "--enable_batching has no effect",
        "--num_load_threads has no effect",
    ]


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("--use_alts_credentials", "--use_alts_credentials is not supported"),
        ("--use_alts_credentials=true", "--use_alts_credentials is not supported"),
        ("--platform_config_file=x", "--platform_config_file is not supported"),
        ("--platform_config_file", "--platform_config_file needs a value"),
        ("--num_load_threads", "--num_load_threads needs a value"),
        ("--enable_model_warmup=perhaps", "--enable_model_warmup=perhaps: expected true or false"),
        ("--enable_batching=perhaps", "--enable_batching=perhaps: expected true or false"),
        ("--batching_parameters_file=x", "--batching_parameters_file without --enable_batching"),
    ],
)
def test_refused_by_name(argument: str, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        translate([argument])
    assert caught.value.message == text


BATCHING = """
max_batch_size { value: 128 }
batch_timeout_micros { value: 0 }
max_enqueued_batches { value: 1000000 }
num_batch_threads { value: 8 }
thread_pool_name { value: "batches" }
allowed_batch_sizes: 32
allowed_batch_sizes: 128
pad_variable_length_inputs: true
"""


def test_batching_parameters_are_read(tmp_path: Path) -> None:
    """Nothing is batched, so that answers are the same; what the stock server refuses is told."""
    file = tmp_path / "batching.config"
    file.write_text(BATCHING)
    parsed, notes = translate([f"--batching_parameters_file={file}", "--enable_batching", "m"])
    assert parsed == ["m"]
    assert [note.partition(" has no effect")[0] for note in notes] == [
        "--batching_parameters_file",
        "--enable_batching",
    ]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("max_batch_size: 32", "line 1"),
        ("batch_size { value: 3 }", 'has no field named "batch_size"'),
        ("max_batch_size { value: 0 }", "max_batch_size is 0, expected at least 1"),
        ("num_batch_threads { value: -1 }", "num_batch_threads is -1, expected at least 1"),
        ("allowed_batch_sizes: [8, 16]", "is 16, max_batch_size 1000: they must be equal"),
        ("allowed_batch_sizes: [16, 8, 1000]", "expected them to grow"),
        (
            "allowed_batch_sizes: [8, 2000] enable_large_batch_splitting { value: true }",
            "is 2000, max_batch_size 1000: it must not be greater",
        ),
        (
            "allowed_batch_sizes: [8, 16] enable_large_batch_splitting { value: true } "
            "max_execution_batch_size { value: 32 }",
            "is 16, max_execution_batch_size 32: they must be equal",
        ),
    ],
)
def test_mistakes_in_batching_parameters(tmp_path: Path, text: str, cause: str) -> None:
    file = tmp_path / "batching.config"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        translate(["--enable_batching=true", f"--batching_parameters_file={file}"])
    assert str(file) in caught.value.message
    assert cause in caught.value.cause


def test_batching_parameters_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="none cannot be read"):
        translate(["--enable_batching", f"--batching_parameters_file={tmp_path / 'none'}"])


def test_refused_by_the_command() -> None:
    command = [sys.executable, "-m", "serving.cli", "run", "--mixed_precision=bfloat16"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: --mixed_precision is not supported" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "there is no model to serve"),
        (("a", "--model_base_path=b"), "MODEL_BASE_PATH is a, --model-base-path b"),
        (("--model_config_file=none.config",), "none.config cannot be read"),
        (("m", "--port=0", "--tensorflow_session_config_file=none"), "none cannot be read"),
        (("m", "--grpc_channel_arguments=grpc.x"), "'grpc.x' is not of the form NAME=VALUE"),
    ],
)
def test_arguments_that_do_not_fit(arguments: tuple[str, ...], text: str) -> None:
    ran = run_app(app, "run", *arguments)
    assert ran.code == 2, ran.err
    assert text in ran.err
    assert "hint: " in ran.err


def test_version() -> None:
    ran = run_app(app, "run", "--version")
    assert (ran.code, ran.out.split()[0]) == (0, "export-model")
