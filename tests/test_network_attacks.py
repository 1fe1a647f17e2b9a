"""Whoever connects to a run's listeners, or sits between two of them, changes nothing and delays nobody."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lib.distributed import ring_start
from tests import tiny
from tests.attacks_network import ATTACKS, WORDS, free_ports, relay
from tests.tiny import ROOT

FEW = ("nothing", "a greeting and zeros")  # of what a stranger says
LEFT_OUT = tuple(f" says {word}" for word in WORDS if word not in FEW)  # benchmarks/attack.py has them
NAMES = [name for name in ATTACKS if not name.endswith(LEFT_OUT) and not name.startswith("dashboard")]


@pytest.mark.parametrize("name", NAMES)
def test_it_holds(name: str, tmp_path: Path) -> None:
    assert ATTACKS[name](tmp_path) is None


@pytest.mark.parametrize(("strategy", "bits"), [("independent", 0x40), ("pipelined", 0x40), ("pipelined", 0)])
@pytest.mark.long("pipelined-0", "independent-64")
def test_a_run_whose_arrays_are_changed_on_their_way_ends_before_it_saves_them(
    strategy: str, bits: int, tmp_path: Path
) -> None:
    """Somebody between two ranks, whom the start does not find: the weights stay equal on both, and are nobody's.

    Who changes no bit of more messages than are compared as one is left alone.
    """
    words = tiny.settings(
        tmp_path, rows=64, train__steps=6, checkpoint__every=2, evaluate__samples=0, data__valid="null"
    )
    if strategy == "independent":  # adapters of 2 MB: what is smaller travels as messages, which nobody changes unseen
        tiny.model_folder(tmp_path / "model", hidden_size=256, intermediate_size=256)
    command = [
        sys.executable,
        "train.py",
        "--config",
        str(tiny.config_file(tmp_path)),
        *words,
        "run.name=r",
        f"strategy={strategy}",
        *(() if bits else ("train.steps=9", "plan.micro_batch_sizes=[1]")),
        *(("model.rank=64",) if strategy == "independent" else ()),
    ]
    ports = free_ports(2)

    def change(piece: bytes, number: int) -> bytes:
        """Flips one bit of a float in what is long: gradients, adapters, activations."""
        if number == 0 or len(piece) < 4096:
            return piece
        return piece[:2002] + bytes([piece[2002] ^ bits]) + piece[2003:]

    false = relay(change, ports[1])
    processes = []
    for rank, view in enumerate(([ports[0], false], ports)):
        hosts = tmp_path / f"hosts-{rank}.json"
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in view]))
        own = {"MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank), ring_start.RELAYED: "1"}
        processes.append(
            subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **own}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    for process in processes:
        output, errors = process.communicate(timeout=120)
        if not bits:
            assert process.returncode == 0, output + errors
            continue
        assert process.returncode == 1, output + errors
        assert "got another result of" in errors or "got something else than rank" in errors, errors
        assert "connect the hosts by ssh or WireGuard" in errors, errors
        assert "Traceback" not in errors
    assert any((tmp_path / "runs" / "r" / "checkpoints").glob("step-*")) == (not bits), "it is in no checkpoint"
    assert any((tmp_path / "runs" / "r").glob("adapters*")) == (not bits), "it is in no adapter"
