"""The workflows for GitHub's runners, as far as they can be judged without them: form, pinned actions, real targets."""

import os
import re
import shlex
import subprocess
from typing import Any

import pytest
import yaml

from tests.tiny import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
RUNNERS = {"ubuntu-24.04", "ubuntu-24.04-arm", "macos-14", "macos-15"}  # x86-64 and arm64 Linux, Apple silicon


def jobs_of(path: Any) -> dict[str, dict[str, Any]]:
    tree = yaml.safe_load(path.read_text())
    assert tree[True].keys() >= {"push", "pull_request"}, "YAML 1.1 reads the key `on` as true, and so does GitHub not"
    assert tree["permissions"] == {"contents": "read"}
    return dict(tree["jobs"])


def runners_of(job: dict[str, Any]) -> set[str]:
    matrix = job["strategy"]["matrix"]
    return {one["runner"] for one in matrix["include"]} if "include" in matrix else set(matrix["runner"])


def test_every_kind_of_runner_trains_and_tests() -> None:
    seen: set[str] = set()
    for path in WORKFLOWS:
        for job in jobs_of(path).values():
            assert job["runs-on"] == "${{ matrix.runner }}" and 0 < job["timeout-minutes"] <= 120
            seen |= runners_of(job)
            words = " ; ".join(step.get("run", "") for step in job["steps"])
            assert {"make train", "make test", "make doctor"} <= {one.strip() for one in words.split(";")}
            required = [step for step in job["steps"] if step.get("run") in ("make train", "make test")]
            assert not any("continue-on-error" in step for step in required)
    assert seen == RUNNERS


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_and_targets_exist(path: Any) -> None:
    for line in path.read_text().splitlines():
        if "uses:" in line:
            assert re.fullmatch(r" *- uses: [\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    targets = set()
    for job in jobs_of(path).values():
        for step in job["steps"]:
            words = shlex.split(step.get("run", ""))
            targets |= set(words[words.index("make") + 1 :]) if "make" in words else set()
    assert targets >= {"setup", "train", "test", "doctor"}
    for target in targets:
        words = ["make", "-n", "-o", "setup", target]
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"make {target}: {done.stderr}"
