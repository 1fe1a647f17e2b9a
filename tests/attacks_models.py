"""Models, tokenizers, templates and adapters of somebody else: each line an attack, as in tests/attacks.py."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests import tiny
from tests.attacks import Attack, refused, run_of, training

QUICKSTART = tiny.ROOT / "configs/quickstart/model"
EVIL = "import os, pathlib\npathlib.Path(os.environ['MARKER']).touch()\n"  # what none of these files may run
HUGE = 12 * 2**30  # bytes of nothing, which take no room on a disk
Content = bytes | str | dict[str, Any] | list[Any] | Callable[[Path], None]
CHAT = {
    "prompt": [{"role": "user", "content": "a"}],
    "chosen": [{"role": "assistant", "content": "b"}],
    "rejected": [{"role": "assistant", "content": "c"}],
}


def put(path: Path, content: Content) -> None:
    """Writes a file: bytes, text, JSON, or what a function makes there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # it may be what another attack made there: a pipe waits for a reader
    if callable(content):
        content(path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))


def pipe(path: Path) -> None:
    os.mkfifo(path)


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, HUGE)


def link_to(target: str) -> Callable[[Path], None]:
    """A symbolic link."""
    return lambda path: path.symlink_to(target)


def of_files(
    files: dict[str, Content], *words: str, base: str = "stored", may_run: bool = False, told: str = ""
) -> Attack:
    """A model folder with some files of an attacker's in the place of its own.

    base: `stored` for a tiny model with weights, `drawn` for a configuration alone, `chat` for one with a tokenizer.
    may_run: training on it may also end well: what is wrong with it changes nothing. Code never runs.
    """

    def attack(folder: Path) -> str | None:
        model, marker = folder / "evil-model", folder / "code-has-run"
        shutil.rmtree(model, ignore_errors=True)
        marker.unlink(missing_ok=True)
        shutil.copytree(_base(folder, base), model)
        for name, content in files.items():
            changed = content
            if name == "config.json" and isinstance(content, dict):
                changed = json.loads((model / name).read_text()) | content
            put(model / name, changed)
        os.environ["MARKER"] = str(marker)
        given = [f"model.path={model}", f"model.random_init={'true' if base == 'drawn' else 'false'}", *words]
        if base == "chat":
            data = tiny.write_jsonl(folder / "chats.jsonl", [CHAT] * 8)
            given += [f"data.train={data}", "data.valid=null"]
        return _judged(training(folder, *given), marker, may_run, told)

    return attack


def _judged(words: list[str], marker: Path, may_run: bool, told: str = "") -> str | None:
    if may_run:
        status, _, errors = run_of("train.py", words)
        fault = None if status == 0 and "Traceback" not in errors else refused("train.py", words)
    else:
        fault = refused("train.py", words, told)
    return "its code has run" if marker.exists() else fault


def _base(folder: Path, kind: str) -> Path:
    if kind == "chat":
        return QUICKSTART
    if kind == "drawn":
        return tiny.model_folder(folder / "drawn")
    return folder / "stored" if (folder / "stored").exists() else tiny.stored_model(folder)


def of_config(may_run: bool = False, base: str = "stored", **changes: Any) -> Attack:
    """config.json with other values."""
    return of_files({"config.json": changes}, base=base, may_run=may_run)


def of_weights(header: Any, data: bytes = b"", size: int | None = None) -> Attack:
    """A safetensors file whose header lies. size: that it says of the header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return of_files({"model.safetensors": struct.pack("<Q", len(text) if size is None else size) + text + data})


def tensor(shape: list[Any], begin: int = 0, end: int = 4, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def of_template(template: str, may_run: bool = False) -> Attack:
    """A chat template in tokenizer_config.json's place."""

    def attack(folder: Path) -> str | None:
        put(folder / "template.jinja", template)
        return of_files({}, f"data.chat_template={folder / 'template.jinja'}", base="chat", may_run=may_run)(folder)

    return attack


def of_template_file(content: Content) -> Attack:
    """data.chat_template that is no plain file."""

    def attack(folder: Path) -> str | None:
        put(folder / "template.jinja", content)
        return of_files({}, f"data.chat_template={folder / 'template.jinja'}", base="chat")(folder)

    return attack


def of_tokenizer(change: Callable[[dict[str, Any]], Any], may_run: bool = False) -> Attack:
    """A tokenizer.json that was changed."""

    def attack(folder: Path) -> str | None:
        stored = json.loads((QUICKSTART / "tokenizer.json").read_text())
        return of_files({"tokenizer.json": change(stored)}, base="chat", may_run=may_run)(folder)

    return attack


def of_pattern(pattern: str, text: str) -> Attack:
    """A tokenizer that splits texts by a pattern, on texts that make it search for long."""

    def attack(folder: Path) -> str | None:
        model = folder / "evil-tokenizer"
        shutil.rmtree(model, ignore_errors=True)
        shutil.copytree(QUICKSTART, model)
        put(model / "tokenizer.json", splitting(pattern))
        rows = [{"prompt": prompt, "chosen": "a", "rejected": "b"} for prompt in (text, *["a"] * 7)]
        data = tiny.write_jsonl(folder / "long.jsonl", rows)
        return refused("train.py", training(folder, f"model.path={model}", f"data.train={data}", "data.valid=null"))

    return attack


def splitting(pattern: str) -> dict[str, Any]:
    """The quickstart's tokenizer.json, with a pattern that it splits texts by."""
    stored = json.loads((QUICKSTART / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return _with(stored, pre_tokenizer=split)


def of_tokenizer_config(may_run: bool = False, files: dict[str, Content] | None = None, **changes: Any) -> Attack:
    """A tokenizer_config.json that was changed."""

    def attack(folder: Path) -> str | None:
        stored = json.loads((QUICKSTART / "tokenizer_config.json").read_text())
        return of_files({"tokenizer_config.json": stored | changes, **(files or {})}, base="chat", may_run=may_run)(
            folder
        )

    return attack


def of_adapter(config: Content, arrays: dict[str, mx.array] | None = None, weights: Content | None = None) -> Attack:
    """A PEFT adapter as model.adapter."""

    def attack(folder: Path) -> str | None:
        adapter = folder / "evil-adapter"
        shutil.rmtree(adapter, ignore_errors=True)
        plain = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
        put(adapter / "adapter_config.json", plain | config if isinstance(config, dict) else config)
        if weights is not None:
            put(adapter / "adapter_model.safetensors", weights)
        else:
            mx.save_safetensors(str(adapter / "adapter_model.safetensors"), FACTORS if arrays is None else arrays)
        return refused("train.py", training(folder, f"model.adapter={adapter}"))

    return attack


def of_own_adapter(weights: Content, told: str) -> Attack:
    """A run's adapter as model.adapter, with other weights."""

    def attack(folder: Path) -> str | None:
        adapter = folder / "evil-adapter"
        shutil.rmtree(adapter, ignore_errors=True)
        put(adapter / "adapter_config.json", (folder / "runs/done/adapter_config.json").read_bytes())
        put(adapter / "adapters.safetensors", weights)
        return refused("train.py", training(folder, f"model.adapter={adapter}"), told)

    return attack


Q = "base_model.model.model.layers.0.self_attn.q_proj"
FACTORS = {f"{Q}.lora_A.weight": mx.zeros((4, 16)), f"{Q}.lora_B.weight": mx.zeros((16, 4))}
DEEP = "[" * 100_000 + "]" * 100_000
GROWS = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 32}
PADDING = {"strategy": {"Fixed": 10**10}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
PADDING |= {"pad_type_id": 0, "pad_token": "x"}
BOMB = "(a+)+$"  # as long as a universe lasts
SLOW = "(?:a|ab)*!"  # the square of a text's length
WAITS = "{%% for m in messages %%}{{ m.content }}{%% endfor %%}{%% if messages|length > 1 %%}%s{%% endif %%}"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLES = "{% set n = namespace(t='x') %}{% for a in range(40) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}"


def _with(stored: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return stored | changes


ATTACKS: dict[str, Attack] = {
    # config.json
    "model: a type that is another module": of_config(model_type="cache"),
    "model: a type that is a path": of_config(model_type="../../../tests/tiny"),
    "model: a type of the system": of_config(model_type="os.system"),
    "model: a type that is a number": of_config(model_type=3),
    "model: a type that is a list": of_config(model_type=["llama"]),
    "model: a type with a NUL": of_config(model_type="llama\0"),
    "model: no type": of_files({"config.json": '{"hidden_size": 16}'}),
    "model: code of its own": of_files({"config.json": {"model_file": "evil.py"}, "evil.py": EVIL}),
    "model: code of its own, by auto_map": of_files(
        {
            "config.json": {"auto_map": {"AutoConfig": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}},
            "evil.py": EVIL,
        },
        base="chat",
        may_run=True,
    ),
    "model: no heads": of_config(num_attention_heads=0),
    "model: heads below zero": of_config(num_attention_heads=-4),
    "model: key heads that do not divide": of_config(num_key_value_heads=3),
    "model: heads of text": of_config(num_attention_heads="four"),
    "model: a width of 10^12": of_config(hidden_size=10**12, base="drawn"),
    "model: a width of 10^30": of_config(hidden_size=10**30, base="drawn"),
    "model: a width below zero": of_config(hidden_size=-16, base="drawn"),
    "model: 10^9 blocks": of_config(num_hidden_layers=10**9, base="drawn"),
    "model: 33,000 blocks of GPT-2": of_config(n_layer=33_000, base="drawn"),
    "model: a width of 10^9 of GPT-2": of_config(n_embd=10**9, base="drawn"),
    "model: blocks below zero": of_config(num_hidden_layers=-1),
    "model: blocks of text": of_config(num_hidden_layers="2"),
    "model: 10^12 tokens": of_config(vocab_size=10**12, base="drawn"),
    "model: tokens of 10^30": of_config(vocab_size=10**30, base="drawn"),
    "model: no tokens": of_config(vocab_size=0, base="drawn"),
    "model: half a vocabulary": of_config(vocab_size=1.5),
    "model: an epsilon of text": of_config(rms_norm_eps="x"),
    "model: a theta of zero": of_config(rope_theta=0, may_run=True),
    "model: a theta of text": of_config(rope_theta="x"),
    "model: scaling that is none": of_config(rope_scaling={"type": "x", "factor": "y"}),
    "model: scaling of lists": of_config(rope_scaling=[1], may_run=True),
    "model: quantised in groups of 0": of_config(quantization={"group_size": 0, "bits": 4}),
    "model: quantised to 99 bits": of_config(quantization={"group_size": 64, "bits": 99}),
    "model: quantised by a list": of_config(quantization=[1, 2]),
    "model: an end token of objects": of_config(eos_token_id={"a": 1}, may_run=True),
    "model: an end token of text": of_config(eos_token_id=["x", "y"], may_run=True),
    "model: a configuration that is a list": of_files({"config.json": [1, 2]}),
    "model: a configuration of 100,000 lists": of_files({"config.json": DEEP}),
    "model: a configuration that is a pipe": of_files({"config.json": pipe}),
    "model: a configuration that never ends": of_files({"config.json": link_to("/dev/zero")}),
    "model: a configuration that is itself": of_files({"config.json": link_to("config.json")}),
    "model: architectures of numbers": of_config(architectures=[3]),
    "model: an architecture that is a number": of_config(architectures=3),
    "model: text of lists": of_config(text_config=[1]),
    "model: text that is text": of_config(text_config="evil"),
    "model: tokens of text": of_config(vocab_size="many"),
    "model: no end tokens": of_config(eos_token_id=[], may_run=True),
    # Weights
    "weights: a header of 2^63 bytes": of_weights({}, size=2**63),
    "weights: a header of 2^40 bytes": of_weights({}, size=2**40),
    "weights: a header beyond the file": of_weights({}, size=500),
    "weights: a header that is no JSON": of_weights(b"{{{{"),
    "weights: a header that is a list": of_weights([1]),
    "weights: a header of 100,000 lists": of_weights(DEEP.encode()),
    "weights: data beyond the file": of_weights({"a": tensor([1], 0, 4)}),
    "weights: data before the file": of_weights({"a": tensor([1], -8, -4)}, b"\0" * 4),
    "weights: 4 bytes of 2^60 numbers": of_weights({"a": tensor([2**30, 2**30])}, b"\0" * 4),
    "weights: sizes that overflow": of_weights({"a": tensor([2**40, 2**40])}, b"\0" * 4),
    "weights: a size below zero": of_weights({"a": tensor([-1])}, b"\0" * 4),
    "weights: a size of text": of_weights({"a": tensor(["x"])}, b"\0" * 4),
    "weights: a type that is none": of_weights({"a": tensor([1], dtype="X99")}, b"\0" * 4),
    "weights: arrays over each other": of_weights({"a": tensor([1]), "b": tensor([1])}, b"\0" * 4),
    "weights: an array that is text": of_weights({"a": "x"}),
    "weights: a name that a terminal obeys": of_weights({"\x1b[31ma\nb": tensor([1])}, b"\0" * 4),
    "weights: none": of_files({"model.safetensors": b""}),
    "weights: a pipe": of_files({"model.safetensors": pipe}),
    "weights: /dev/zero": of_files({"model.safetensors": link_to("/dev/zero")}),
    "model: a configuration of 12 GB": of_files({"config.json": huge}, base="drawn", told="more than"),
    **{
        f"tokenizer: {name} of 12 GB": of_files({name: huge}, base="chat", told="more than")
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt")
    },
    "weights: an index that points outside": of_files(
        {"model.safetensors.index.json": {"weight_map": {"a": "../../../etc/passwd"}}}, may_run=True
    ),
    # Tokenizers
    "tokenizer: no JSON": of_files({"tokenizer.json": "{"}, base="chat"),
    "tokenizer: a list": of_files({"tokenizer.json": []}, base="chat"),
    "tokenizer: a pipe": of_files({"tokenizer.json": pipe}, base="chat"),
    "tokenizer: /dev/zero": of_files({"tokenizer.json": link_to("/dev/zero")}, base="chat"),
    "tokenizer: no model": of_tokenizer(lambda stored: _with(stored, model={"type": "X"})),
    "tokenizer: ids of 2^40": of_tokenizer(
        lambda stored: _with(
            stored, model=_with(stored["model"], vocab={k: v + 2**40 for k, v in stored["model"]["vocab"].items()})
        )
    ),
    "tokenizer: ids beyond the model's": of_tokenizer(
        lambda stored: _with(
            stored, model=_with(stored["model"], vocab={k: v + 2**20 for k, v in stored["model"]["vocab"].items()})
        )
    ),
    "tokenizer: merges that are none": of_tokenizer(
        lambda stored: _with(stored, model=_with(stored["model"], merges=["x y z", "q"]))
    ),
    "tokenizer: a pattern that never ends": of_pattern(BOMB, "a" * 60 + "!"),
    "tokenizer: a pattern that is slow on long texts": of_pattern(SLOW, "a" * 400_000 + "?!"),
    "tokenizer: a pattern that is none": of_tokenizer(lambda stored: splitting("(")),
    "tokenizer: a rule that makes 10^18 letters of one": of_tokenizer(
        lambda stored: _with(stored, normalizer={"type": "Sequence", "normalizers": [GROWS] * 12})
    ),
    "tokenizer: a rule that writes 100 MB": of_tokenizer(
        lambda stored: _with(stored, normalizer=GROWS | {"content": "x" * 10**8})
    ),
    "tokenizer: texts of 10^10 tokens": of_tokenizer(lambda stored: _with(stored, padding=PADDING)),
    "tokenizer: a class of the system": of_tokenizer_config(tokenizer_class="os.system", may_run=True),
    "tokenizer: a class that is a list": of_tokenizer_config(tokenizer_class=["x"]),
    "tokenizer: code of its own": of_tokenizer_config(
        auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, files={"evil.py": EVIL}, may_run=True
    ),
    "tokenizer: code of its own and no class": of_tokenizer_config(
        auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]},
        tokenizer_class="EvilTokenizer",
        files={"evil.py": EVIL},
        may_run=True,
    ),
    "tokenizer: a parser that is a path": of_tokenizer_config(tool_parser_type="../../evil"),
    "tokenizer: a template that is a module": of_tokenizer_config(chat_template_type="..evil"),
    "tokenizer: added tokens of numbers": of_tokenizer_config(added_tokens_decoder={"x": 3}),
    "tokenizer: a configuration of lists": of_files({"tokenizer_config.json": []}, base="chat"),
    "tokenizer: a configuration that is a pipe": of_files({"tokenizer_config.json": pipe}, base="chat"),
    "tokenizer: generation_config.json of lists": of_files({"generation_config.json": []}, base="chat"),
    "tokenizer: ends of objects": of_files({"generation_config.json": {"eos_token_id": [{}]}}, base="chat"),
    # Templates
    "template: loops in loops": of_template(
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
        "{% endfor %}"
    ),
    "template: 10^12 turns": of_template("{% for a in range(10**12) %}x{% endfor %}"),
    "template: 10 GB of text": of_template("{{ 'x' * 10**10 }}"),
    "template: 10 GB in a few words": of_template("{{ 'x'.ljust(10**10) }}"),
    "template: 10 GB of a number": of_template("{{ '%10000000000d' % 1 }}"),
    "template: 10^10 digits": of_template("{{ (messages|length + 9) ** (10 ** 10) }}"),
    "template: text that doubles": of_template(DOUBLES),
    "template: it waits for an answer, and loops": of_template(WAITS % LOOPS),
    "template: it waits for an answer, and doubles a text": of_template(WAITS % DOUBLES),
    "template: it waits for an answer, and counts to 10^10^10": of_template(
        WAITS % "{{ (messages|length + 9) ** (10 ** 10) }}"
    ),
    "template: it waits for an answer, and writes 10 GB": of_template(WAITS % "{{ 'x'.ljust(10**10) }}"),
    "template: it calls itself": of_template("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"),
    "template: 10,000 brackets": of_template("{{ " + "(" * 10_000 + "1" + ")" * 10_000 + " }}"),
    "template: Python's classes": of_template("{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    "template: Python's functions": of_template("{{ raise_exception.__globals__['os'].system('touch $MARKER') }}"),
    "template: the passwords": of_template("{% include '/etc/passwd' %}"),
    "template: an import": of_template("{% import 'os' as os %}{{ os.system('touch $MARKER') }}"),
    "template: it changes its messages": of_template("{{ messages.append({'role': 'x'}) }}"),
    "template: a complaint that a terminal obeys": of_template("{{ raise_exception('\x1b[31mred\x1b]0;x\x07') }}"),
    "template: no template": of_template("{% for %}"),
    "template: a filter that is none": of_template("{{ messages | evil }}"),
    "template: a pipe": of_template_file(pipe),
    "template: /dev/zero": of_template_file(link_to("/dev/zero")),
    "template: not UTF-8": of_template_file(b"\xff\xfe\xff"),
    # Adapters
    "adapter: rank 0": of_adapter({"r": 0}),
    "adapter: a rank below zero": of_adapter({"r": -4, "use_rslora": True}),
    "adapter: a rank of text": of_adapter({"r": "x"}),
    "adapter: no rank": of_adapter({"r": None}),
    "adapter: an alpha of text": of_adapter({"lora_alpha": "x"}),
    "adapter: an alpha of 10^400": of_adapter({"lora_alpha": 10**400}),
    "adapter: an alpha that is no number": of_adapter('{"peft_type": "LORA", "r": 4, "lora_alpha": NaN}'),
    "adapter: a pattern that is none": of_adapter({"rank_pattern": {"(": 4}}),
    "adapter: patterns that are a list": of_adapter({"rank_pattern": ["x"]}),
    "adapter: a pattern that never ends": of_adapter(
        {"rank_pattern": {"(.|.|.)*(.|.|.)*(.|.|.)*(.|.|.)*(.|.|.)*(.|.|.)*(.|.|.)*(.|.|.)*(.|.|.)*!": 4}}
    ),
    "adapter: a rank pattern of text": of_adapter({"rank_pattern": {"q_proj": "x"}}),
    "adapter: a type that is a list": of_adapter({"peft_type": ["LORA"]}),
    "adapter: a configuration that is a list": of_adapter([1]),
    "adapter: a configuration that is a pipe": of_adapter(pipe),
    "adapter: a configuration of 100,000 lists": of_adapter(DEEP),
    "adapter: weights that are a pipe": of_adapter({}, weights=pipe),
    "adapter: weights that never end": of_adapter({}, weights=link_to("/dev/zero")),
    "adapter: weights that are none": of_adapter({}, weights=b""),
    "adapter: a run's weights that are a pipe": of_own_adapter(pipe, told="adapters.safetensors is a pipe"),
    "adapter: a run's weights that never end": of_own_adapter(link_to("/dev/zero"), told="is a device"),
    "adapter: no arrays": of_adapter({}, {"x": mx.zeros(1)}),
    "adapter: one dimension": of_adapter({}, {name: mx.zeros(4) for name in FACTORS}),
    "adapter: no dimension": of_adapter({}, {name: mx.array(1.0) for name in FACTORS}),
    "adapter: half a layer": of_adapter({}, {f"{Q}.lora_B.weight": mx.zeros((16, 4))}),
    "adapter: a layer that a terminal obeys": of_adapter(
        {}, {f"base_model.model.\x1b[31m.{part}.weight": mx.zeros((4, 4)) for part in ("lora_A", "lora_B")}
    ),
    "adapter: an expert of 10^9": of_adapter(
        {},
        {
            f"base_model.model.model.layers.0.mlp.experts.{10**9}.up_proj.{part}.weight": mx.zeros((4, 4))
            for part in ("lora_A", "lora_B")
        },
    ),
}
