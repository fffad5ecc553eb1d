"""What typer would answer with its usage text and a box is one line here, for every command."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from hyperparallel.cli.__main__ import app

pytestmark = pytest.mark.pure
PLAN = ("plan", "qwen3-0.6b", "--cluster", "h100")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*PLAN, "--devices", "abc"], "--devices: got 'abc'; allowed: a whole number of at least 1; write "
         "--devices 8 instead"),
        ([*PLAN, "--devices", "1e3"], "write --devices 1000 instead"),
        ([*PLAN, "--devices=1e3"], "got '1e3'; allowed: a whole number of at least 1; write --devices 1000"),
        ([*PLAN, "--devices", "0"], "--devices: got '0'"),
        ([*PLAN, "--top", "0"], "--top: got '0'; allowed: a whole number of at least 1; write --top 5"),
        ([*PLAN, "--top"], "--top: got nothing; allowed: a value after it; write --top 5 instead"),
        ([*PLAN, "--runnable=3"], "--runnable: got '3'; allowed: no value after it"),
        ([*PLAN, "--globalbatch", "3"], "option: got '--globalbatch'; allowed: --mesh, "),
        ([*PLAN, "--globalbatch", "3"], "write --global-batch instead"),
        (["train", "llama_demo", "--steps", "many"], "--steps: got 'many'; allowed: a whole number"),
        (["doctor", "--ranks", "-1"], "--ranks: got '-1'"),
        (["compare", "a", "b", "--within", "little"], "got 'little'; allowed: a number of at least 0; write"),
        (["compare", "a", "b", "c"], "arguments: got 'compare a b c'; allowed: compare PREDICTED MEASURED"),
        (["sweep", "qwen3-0.6b"], "--cluster: got nothing; allowed: Machines"),
        (["plan"], "MODEL: got nothing; allowed: With --cluster a model preset"),
        (["plam", "qwen3-0.6b"], "command: got 'plam'; allowed: train, plan, sweep, show, compare, doctor; "
         "write plan instead"),
        (["--bogus"], "option: got '--bogus'; allowed: --help"),
    ],
)  # fmt: skip
def test_a_wrong_word_is_one_line(words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ") and said in line


def test_an_option_like_no_other_suggests_none() -> None:
    done = CliRunner().invoke(app, [*PLAN, "--bogus"])
    assert done.exit_code == 2 and "instead" not in done.stderr


def test_no_words_at_all_print_the_help() -> None:
    done = CliRunner().invoke(app, [])
    assert "error" not in done.output and "Usage" in done.output


def test_ctrl_c_while_the_commands_load_is_no_traceback() -> None:
    program = (
        "import runpy, sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "runpy.run_module('hyperparallel', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr and done.stderr.strip() == "stopped"
    assert done.returncode in (130, -2)  # Python may end itself by the signal; a shell says 130 for both
