"""Parsers of what comes with models, fed as those of tests/parsers.py: adapters, weights, templates, cards, calibrations."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
from gguf import GGUFWriter
from hypothesis import strategies as st

from lib.config.schema import DataSettings
from lib.data import hub_files, parquet_pages
from lib.data.chat_template import ChatTemplate, Conversation
from lib.data.tokenizer import load_tokenizer_of
from lib.errors import UserError
from lib.export import gguf_reader
from lib.launch import hostfile
from lib.model import adapter_files, load, peft_files
from lib.plan import calibration
from lib.system import model_folder
from tests import seeds, tiny
from tests.mutations import bent, changed, json_text, lines_changed
from tests.parsers import THRIFT, Parser, as_json, trees
from tests.test_forward import FAMILIES

Q = "base_model.model.model.layers.0.self_attn.q_proj"
PEFT = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "use_rslora": False,
    "rank_pattern": {"q_proj": 4},
    "target_modules": ["q_proj"],
}
PADDED = {
    "padded": True,
    "layers": {"model.layers.0.self_attn.q_proj": {"rank": 4, "scale": 2.0}},
    "lora_parameters": {"rank": 4, "scale": 2.0},
}
OURS = {"model.layers.0.self_attn.q_proj.lora_a": ((16, 4), mx.float32)}
TEMPLATE = "{% for m in messages %}{{ '<|' ~ m['role'] ~ '|>' ~ m['content'] }}{% if loop.last %}<|end|>{% endif %}{% endfor %}"
WORDS = (
    *(
        "{%",
        "%}",
        "{{",
        "}}",
        " for ",
        " in ",
        "messages",
        "range(3)",
        " if ",
        " endif ",
        " endfor ",
        " set ",
        "x",
        "'y'",
    ),
    *(
        " macro m() ",
        " endmacro ",
        "m()",
        "|",
        "tojson",
        "upper",
        "~",
        "[0]",
        ".content",
        "loop.",
        "raise_exception('\x1b')",
    ),
)
CARD = b"---\nconfigs:\n- config_name: a\n  data_files:\n  - split: train\n    path: [b/*.jsonl, '**/c.parquet']\n---\n# x\n"
CARD_TREE = {
    "configs": [
        {
            "config_name": "a",
            "default": True,
            "data_files": [{"split": "train", "path": ["b/*.jsonl", "**/c.parquet"]}],
        },
        {"config_name": "b", "data_dir": "b", "data_files": "b/*.jsonl"},
    ]
}
CARD_WORDS = st.sampled_from(["configs", "config_name", "data_files", "split", "path", "data_dir", "default", "train"])
NAMES = ["a/b.jsonl", "b/c.jsonl", "data/train-0.parquet", "README.md"]


def safetensors(header: object, size: int | None = None) -> bytes:
    """A file with this header, and 512 bytes of data. size: what it says of the header's."""
    text = json_text(header)
    return struct.pack("<Q", len(text) if size is None else size) + text + bytes(512)


def folder_of(configuration: dict[str, object], header: dict[str, object]) -> st.SearchStrategy[bytes]:
    """The configuration of an adapter with something changed, or its weights, which the same parser takes."""
    return st.one_of(
        changed([configuration], [*PEFT, *PADDED, "rank", "scale", "alpha_pattern", "bias"]).map(json_text),
        bent(as_json(configuration)),
        changed([header], list(OURS), ["F32", "BF16", "I64", "X", 64, 8]).map(safetensors),
        HEADERS.map(safetensors),
        st.builds(safetensors, HEADERS, st.sampled_from([0, 7, 2**31, 2**40, 2**63, 2**64 - 1])),
    )


def card(tree: object) -> bytes:
    """A data set's README.md with this front matter."""
    return b"---\n" + json_text(tree) + b"\n---\n# x\n"


def _peft(data: bytes, folder: Path) -> None:
    """A configuration, and then the weights, with the other half as it should be."""
    good = {f"{Q}.lora_A.weight": mx.zeros((4, 16)), f"{Q}.lora_B.weight": mx.zeros((16, 4))}
    (folder / model_folder.ADAPTER_CONFIG).write_bytes(data)
    mx.save_safetensors(str(folder / model_folder.PEFT_WEIGHTS), good)
    _both(lambda: peft_files.read(folder, "model.adapter"))
    (folder / model_folder.ADAPTER_CONFIG).write_bytes(as_json(PEFT))
    (folder / model_folder.PEFT_WEIGHTS).write_bytes(data)
    peft_files.read(folder, "model.adapter")


def _adapter(data: bytes, folder: Path) -> None:
    mx.save_safetensors(
        str(folder / model_folder.ADAPTER_WEIGHTS), {name: mx.zeros(shape) for name, (shape, _) in OURS.items()}
    )
    (folder / model_folder.ADAPTER_CONFIG).write_bytes(data)
    _both(lambda: mx.eval(adapter_files.read_trained(OURS, folder, "--run")))
    (folder / model_folder.ADAPTER_CONFIG).write_bytes(as_json(PADDED))
    (folder / model_folder.ADAPTER_WEIGHTS).write_bytes(data)
    mx.eval(adapter_files.read_trained(OURS, folder, "--run"))


def _both(read: object) -> None:
    """Goes on behind a refusal: a second reader waits."""
    try:
        read()  # type: ignore[operator]
    except UserError:
        return


def _model(data: bytes, folder: Path) -> None:
    (folder / "config.json").write_bytes(data)
    settings = tiny_settings(folder)
    model_folder.end_ids(model_folder.resolve(str(folder)))
    load.load(settings, 0, lazy=True)


def tiny_settings(folder: Path) -> object:
    from lib.config.schema import ModelSettings

    return ModelSettings(path=str(folder), random_init=True)


def _template(data: bytes, folder: Path) -> None:
    (folder / "template").write_bytes(data)
    template = ChatTemplate(_tokenizer(), DataSettings(train="-", chat_template=str(folder / "template")))
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    template.texts([Conversation(turns, None, template.arguments_without_answer)], True)  # type: ignore[list-item]
    assert template.refuses_system in (True, False)


def _tokenizer() -> object:
    from lib.config.schema import ModelSettings

    global _loaded
    if _loaded is None:
        _loaded = load_tokenizer_of(ModelSettings(path=str(tiny.ROOT / "configs/quickstart/model")))
    return _loaded


_loaded: object = None


def _card(data: bytes, folder: Path) -> None:
    for config, split in ((None, "train"), ("a", "test"), ("b", "train")):
        try:
            hub_files.files_of_split(NAMES, data.decode("utf-8", "replace"), config, split)
        except ValueError as why:  # what open_stream makes one line of
            str(UserError(why)).encode()


def _hub_list(data: bytes, folder: Path) -> None:
    (folder / "data.json").write_bytes(b"[" + data)
    list(hub_files.open_stream("hf://x", str(folder), {}))


def _pages(data: bytes, folder: Path) -> None:
    try:
        parquet_pages.struct(data, 0)
    except (IndexError, parquet_pages.FalsePage):
        return


def _calibration(data: bytes, folder: Path) -> None:
    (folder / "a.json").write_bytes(data)
    for curve in calibration.read_calibration(folder / "a.json").curves:
        assert curve.best_point and curve.seconds(np.array([1.0, 100.0])).all()


def _gguf(data: bytes, folder: Path) -> None:
    (folder / "model.gguf").write_bytes(data)
    gguf_reader.GgufModel(folder / "model.gguf")


def gguf_file() -> bytes:
    """A small file: two values, a list, and one tensor."""
    with tempfile.TemporaryDirectory() as folder:
        writer = GGUFWriter(Path(folder, "a"), "llama")
        writer.add_block_count(2)
        writer.add_token_list(["a", "b"])
        writer.add_tensor("x", np.zeros((4, 4), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return Path(folder, "a").read_bytes()


def _variables(data: bytes, folder: Path) -> None:
    hostfile.environment([data.decode("utf-8", "surrogateescape")], "--env")


HEADERS = st.dictionaries(
    st.sampled_from([f"{Q}.lora_A.weight", f"{Q}.lora_B.weight", *OURS, "x", "__metadata__"]),
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "BF16", "I64", "BOOL", "X", "F8_E4M3"]),
            "shape": st.lists(st.one_of(st.integers(0, 20), st.sampled_from([-1, 2**31, 2**62, "x"])), max_size=3),
            "data_offsets": st.lists(st.one_of(st.integers(0, 64), st.sampled_from([-8, 2**40])), max_size=3),
        }
    ),
    max_size=3,
)
GOOD_HEADER = {
    f"{Q}.lora_A.weight": {"dtype": "F32", "shape": [4, 16], "data_offsets": [0, 256]},
    f"{Q}.lora_B.weight": {"dtype": "F32", "shape": [16, 4], "data_offsets": [256, 512]},
    "__metadata__": {"format": "mlx"},
}
OUR_HEADER = {
    name: {"dtype": "F32", "shape": list(shape), "data_offsets": [0, 256]} for name, (shape, _) in OURS.items()
}
NUMBERS = [struct.pack("<Q", number) for number in (0, 1, 2, 8, 2**31, 2**40, 2**63, 2**64 - 1)]
NUMBERS += [struct.pack("<I", number) for number in (0, 4, 8, 9, 12, 2**32 - 1)]
FAMILY_CONFIGS = [tiny.LLAMA | {"model_type": family, **changes} for family, changes in FAMILIES.items()]
FAMILY_CONFIGS += [
    tiny.LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}, "quantization": {"group_size": 32, "bits": 4}},
    tiny.LLAMA | {"eos_token_id": [1, 2], "text_config": {"vocab_size": 48}, "torch_dtype": "bfloat16"},
]
TEMPLATES = [file.read_text() for file in sorted((tiny.ROOT / "tests/templates").glob("*.jinja"))]
MODEL_PARSERS: dict[str, Parser] = {
    "PEFT folders": Parser(folder_of(PEFT, GOOD_HEADER), _peft, ("model/peft_files.py",)),
    "adapters": Parser(folder_of(PADDED, OUR_HEADER), _adapter, ("model/adapter_files.py",)),
    "model configs": Parser(
        st.one_of(
            changed(FAMILY_CONFIGS, ["rope_scaling", "rope_theta", "head_dim", "model_file", "x"]).map(json_text),
            bent(as_json(tiny.LLAMA)),
        ),
        _model,
        ("model/load.py", "model/lookup_tables.py", "system/model_folder.py"),
    ),
    "templates": Parser(
        st.one_of(
            bent(TEMPLATE.encode(), [word.encode() for word in WORDS]),
            st.sampled_from(TEMPLATES).flatmap(lambda text: bent(text.encode(), [word.encode() for word in WORDS])),
            st.sampled_from(TEMPLATES).flatmap(lambda text: lines_changed(text, WORDS)),
            st.lists(st.sampled_from(WORDS), max_size=15).map(lambda words: "".join(words).encode()),
        ),
        _template,
        ("data/chat_template.py", "data/template_facts.py"),
    ),
    "hub cards": Parser(
        st.one_of(
            bent(CARD),
            lines_changed(CARD.decode(), ["configs:", "- split: x", "path: [", "'**'", "../..", "{a: b}"]),
            changed([CARD_TREE], [], ["b/*.jsonl", "**", "[[[*", "/etc", "../x"]).map(card),
            trees(CARD_WORDS).map(lambda tree: card({"configs": [tree]})),
        ),
        _card,
        ("data/hub_files.py",),
    ),
    "hub lists": Parser(
        st.one_of(
            bent(b'{"prompt": "a"}, {"prompt": "\xc3\xa4"}]'),
            changed([[{"prompt": "a", "chosen": ["b"]}, {"prompt": "b"}]]).map(lambda tree: json_text(tree)[1:]),
            st.lists(trees(CARD_WORDS), max_size=4).map(lambda tree: as_json(tree)[1:]),
        ),
        _hub_list,
        ("data/hub_files.py",),
    ),
    "parquet pages": Parser(
        st.one_of(
            st.binary(max_size=60),
            bent(bytes.fromhex("150415801015201500") + b"\x2c\x15\x06\x15\x00\x15\x06\x15\x06\x00\x00", THRIFT),
        ),
        _pages,
        ("data/parquet_pages.py",),
    ),
    "calibrations": Parser(
        st.one_of(changed([seeds.CALIBRATION]).map(json_text), bent(as_json(seeds.CALIBRATION))),
        _calibration,
        ("plan/calibration.py",),
    ),
    "GGUF": Parser(bent(gguf_file(), NUMBERS), _gguf, ("export/gguf_reader.py",)),
    "variables": Parser(bent(b"NAME=VALUE", [b"=", b"\n", b"\0", b" "]), _variables, ("launch/hostfile.py",)),
}
