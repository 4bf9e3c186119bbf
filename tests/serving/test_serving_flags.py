"""TF Serving's flags on the command line of `serve-model run`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from exporter.errors import UsageError
from exporter.options.words import count
from serving.cli import app
from serving.server_options import ServerOptions
from serving.stock_flags import STOCK_FLAGS, translate
from tests.support.commands import run_app

ROOT = Path(__file__).parents[2]


def options_of_run() -> dict[str, Any]:
    command = typer.main.get_command(app).commands["run"]
    return {name: parameter for parameter in command.params for name in parameter.opts}


@pytest.mark.parametrize("flag", STOCK_FLAGS, ids=lambda flag: flag.name)
def test_what_means_the_same_is_an_option(flag: Any) -> None:
    option = options_of_run()[flag.own]
    assert getattr(option, "is_flag", False) is (flag.is_boolean and flag.own != "--flag")


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
        (["--enable_signature_method_name_check"], ["--flag=enable_signature_method_name_check"]),
        (["--enable_signature_method_name_check=true"], ["--flag=enable_signature_method_name_check"]),
        (["--enable_signature_method_name_check=false"], []),
        (["--enable_model_warmup=false"], ["--flag=enable_model_warmup=false"]),
        (["--enable_model_warmup"], []),
        (["--rest_api_timeout_in_ms=7"], ["--flag=rest_api_timeout_in_ms=7"]),
        (["--flag=saved_model_tags=a"], ["--flag=saved_model_tags=a"]),
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
    assert notes == [
        "--enable_batching has no effect in serve-model run",
        "--num_load_threads has no effect in serve-model run",
    ]


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("--use_alts_credentials", "--use_alts_credentials is not supported by serve-model run"),
        ("--use_alts_credentials=true", "--use_alts_credentials is not supported by serve-model run"),
        ("--platform_config_file=x", "--platform_config_file is not supported by serve-model run"),
        ("--num_load_threads", "--num_load_threads needs a value"),
        ("--enable_model_warmup=perhaps", "--enable_model_warmup=perhaps: expected true or false"),
    ],
)
def test_refused_by_name(argument: str, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        translate([argument])
    assert caught.value.message == text


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
        (("a", "--model_base_path=b"), "MODEL is a, --model-base-path b"),
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


@pytest.mark.parametrize(
    ("value", "sent"),
    [("5", 5), ("-5", -5), ("--5", "--5"), ("-", "-"), ("", ""), ("\u0665", "\u0665"), ("a=b", "a=b")],
)
def test_values_of_grpcs_arguments(value: str, sent: int | str) -> None:
    assert ServerOptions(grpc_channel_arguments=f"a={value}").channel_arguments() == [("a", sent)]


@pytest.mark.parametrize("value", [1 << 31, -(1 << 31) - 1, "9" * 5000], ids=lambda value: str(value)[:11])
def test_a_number_that_grpc_does_not_take_is_refused(value: int | str) -> None:
    with pytest.raises(UsageError, match="out of range"):
        ServerOptions(grpc_channel_arguments=f"a={value}").channel_arguments()


@pytest.mark.parametrize("text", [str(1 << 63), "9" * 5000])
def test_a_whole_number_has_a_limit(text: str) -> None:
    with pytest.raises(UsageError, match="not a whole number below"):
        count("--flag num_request_iterations_for_warmup", text)


@pytest.mark.parametrize("name", ["intra_op", "inter_op", "session"])
def test_numbers_of_threads_fit_tensorflows_configuration(name: str) -> None:
    field = f"tensorflow_{name}_parallelism"
    with pytest.raises(UsageError, match=f"{field} must be within 0..2147483647"):
        ServerOptions(**{field: 1 << 31})


def test_version() -> None:
    ran = run_app(app, "run", "--version")
    assert (ran.code, ran.out.split()[0]) == (0, "export-model")
