"""Records, tokens, truncation, batches: on real tokenizers built here, on bad input, and on real data."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example as hypothesis_example
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from lib.config.settings import DataSettings
from lib.data import record_files
from lib.data.batch import collate
from lib.data.batch_shapes import pad_length
from lib.data.dataset import Dataset, Example, load_dataset
from lib.data.encode import truncate
from lib.data.groups import load_groups
from lib.data.order import prefetch
from lib.data.tokenizer import Vocabulary
from lib.errors import UserError
from tests.tiny import write_jsonl as write

CORPUS = ["What is 12 + 30?", "The answer is 42.", "Name a colour. Blue, or red.", "Hello there\n\nuser assistant"] * 9
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Writes BOS itself, trims, ends a turn with the model's end token, insists on alternating roles.
ALTERNATING = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
ENDLESS = (  # Marks no end at all.
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
PAIR = {"prompt": "What is 12 + 30?", "chosen": "The answer is 42.", "rejected": "Blue."}
USER = {"role": "user", "content": PAIR["prompt"]}
GOOD = {"role": "assistant", "content": PAIR["chosen"]}
BAD = {"role": "assistant", "content": PAIR["rejected"]}


def byte_level(
    corpus: list[str], bos: bool = False, template: str | None = None, eos: str = "</s>", size: int = 400
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer in GPT-2's and Llama 3's style."""
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [AddedToken(token, special=True) for token in SPECIAL]
    options = {"vocab_size": size, "special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
    model.train_from_iterator(corpus, trainers.BpeTrainer(**options))
    if bos:
        model.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<s>", eos_token=eos)
    wrapped.chat_template = template
    return wrapped


def sentencepiece(template: str | None = None) -> PreTrainedTokenizerFast:
    """Llama 2's style: a space opens every text, a line break is its own token."""
    words = ["\n", *["▁", "a", "▁a", "▁What", "▁is", "▁The", "▁answer", "▁42.", "42.", "▁Blue.", "[INST]", "▁[/INST]"]]
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, "<unk>", *words])}
    model = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    opening = pre_tokenizers.Metaspace(prepend_scheme="first")
    model.pre_tokenizer = pre_tokenizers.Sequence([opening, pre_tokenizers.Split("\n", "isolated")])
    model.decoder = decoders.Metaspace(prepend_scheme="first")
    model.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    model.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    wrapped.chat_template = template
    return wrapped


PLAIN = byte_level(CORPUS)


@pytest.fixture
def load(tmp_path):
    """load(records, kind, tokenizer, **settings) ➜ the data set, through a file."""

    def call(records: list[Any], kind: str = "preference", tokenizer: Any = PLAIN, **settings: Any) -> Dataset:
        vocab_size = settings.pop("vocab_size", None)
        path = str(write(tmp_path / "data.jsonl", records))
        eos = None if tokenizer is None else tokenizer.eos_token_id
        options = DataSettings(train=path, **settings)
        return load_dataset(path, options, kind, tokenizer, vocabulary=Vocabulary(eos, vocab_size))  # type: ignore[arg-type]

    return call


def texts(dataset: Dataset, tokenizer: Any, row: int = 0) -> list[str]:
    example = dataset[row]
    return [tokenizer.decode(ids) for ids in (example.prompt_ids, *example.completions)]


# ------------------------------------------------------------------------------------------- forms of records


@pytest.mark.parametrize("wrap", [lambda t: t, TokenizerWrapper], ids=["transformers", "mlx_lm"])
@pytest.mark.parametrize(
    "record",
    [
        PAIR,
        {"prompt": [USER], "chosen": PAIR["chosen"], "rejected": PAIR["rejected"]},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": PAIR["prompt"], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [USER], "chosen": [GOOD], "rejected": PAIR["rejected"]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": PAIR["prompt"], "chosen": [USER, GOOD], "rejected": [USER, BAD], "score": 3, "source": None},
        {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    ],
)
def test_every_form_of_a_pair_gives_the_same_tokens(load, record, wrap):
    tokenizer = wrap(byte_level(CORPUS, template=CHATML))
    dataset = load([record], tokenizer=tokenizer)
    assert texts(dataset, tokenizer) == [
        "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n",
        "The answer is 42.<|im_end|>",
        "Blue.<|im_end|>",
    ]
    # The boundary is a line break behind special tokens: here, the whole tokenises as its parts do.
    inner = getattr(tokenizer, "_tokenizer", tokenizer) if wrap is TokenizerWrapper else tokenizer
    whole = inner.apply_chat_template([USER, GOOD], tokenize=True, return_dict=False)
    example = dataset[0]
    assert [*example.prompt_ids, *example.completions[0]] == whole[: whole.index(3, len(example.prompt_ids)) + 1]


@pytest.mark.parametrize("record", [PAIR, {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}])
@pytest.mark.parametrize("bos", [False, True])
def test_without_a_template_texts_stay_plain(load, record, bos):
    tokenizer = byte_level(CORPUS, bos=bos)
    is_chat = isinstance(record["prompt"], list)  # refused, unless it is said that no template is wanted
    example = load([record], tokenizer=tokenizer, **({"chat_template": False} if is_chat else {}))[0]
    assert example.prompt_ids.tolist() == tokenizer.encode(PAIR["prompt"])
    for ids, name in zip(example.completions, ("chosen", "rejected"), strict=True):
        assert ids.tolist() == [*tokenizer.encode(PAIR[name], add_special_tokens=False), tokenizer.eos_token_id]
        assert ids.dtype == np.int32
    off = load([PAIR], tokenizer=byte_level(CORPUS, bos=bos, template=CHATML), chat_template=False)
    assert off[0].prompt_ids.tolist() == example.prompt_ids.tolist()


def test_bos_stands_once(load):
    tokenizer = byte_level(CORPUS, bos=True, template=ALTERNATING)
    example = load([PAIR], tokenizer=tokenizer)[0]
    assert example.prompt_ids.tolist().count(tokenizer.bos_token_id) == 1 and example.prompt_ids[0] == 0
    written = load([PAIR | {"prompt": "<s>Hello"}], tokenizer=byte_level(CORPUS, bos=True))[0]
    assert written.prompt_ids.tolist().count(0) == 1


@pytest.mark.parametrize(
    "template, eos", [(CHATML, "</s>"), (CHATML, "<|im_end|>"), (ALTERNATING, "</s>"), (ENDLESS, "</s>")]
)
def test_a_completion_ends_with_exactly_one_end_token(load, template, eos):
    tokenizer = byte_level(CORPUS, template=template, eos=eos)
    ends = {tokenizer.convert_tokens_to_ids(token) for token in ("</s>", "<|im_end|>")}
    for ids in load([PAIR], tokenizer=tokenizer)[0].completions:
        assert ids[-1] in ends and not ends & set(ids[:-1].tolist())


def test_an_end_token_in_the_text_is_not_doubled(load):
    example = load([PAIR | {"chosen": "Yes.</s>"}])[0]
    assert example.completions[0].tolist().count(1) == 1 and example.completions[0][-1] == 1


def test_a_sentencepiece_completion_begins_without_a_space_of_its_own(load):
    """Tokenised alone, `42.` would become `▁42.`, and `answer` after `[/INST] ` would get two spaces."""
    tokenizer = sentencepiece()
    example = load([{"prompt": "What is", "chosen": "42.", "rejected": " 42."}], tokenizer=tokenizer)[0]
    names = [tokenizer.convert_ids_to_tokens(ids.tolist()) for ids in (example.prompt_ids, *example.completions)]
    assert names == [["<s>", "▁What", "▁is"], ["42.", "</s>"], ["▁42.", "</s>"]]
    chat = sentencepiece(ALTERNATING.replace("+ ' ' + eos_token", "+ eos_token"))
    example = load([{"prompt": "What is", "chosen": "The answer is 42.", "rejected": "Blue."}], tokenizer=chat)[0]
    assert chat.convert_ids_to_tokens(example.prompt_ids.tolist()) == ["<s>", "[INST]", "▁What", "▁is", "▁[/INST]"]
    assert chat.convert_ids_to_tokens(example.completions[0].tolist()) == ["▁The", "▁answer", "▁is", "▁42.", "</s>"]


@pytest.mark.parametrize(
    "record, settings, columns",
    [
        ({"prompt": PAIR["prompt"], "completion": PAIR["chosen"]}, {}, "prompt + completion"),
        ({"prompt": [USER], "completion": [GOOD]}, {}, "prompt + completion"),
        ({"messages": [USER, GOOD], "prompt": "ignored"}, {}, "messages"),
        ({"q": PAIR["prompt"], "a": PAIR["chosen"]}, {"columns": {"prompt": "q", "completion": "a"}}, "q + a"),
        (PAIR, {}, "chosen (preference records: the other completion is not used)"),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, {}, "chosen (preference records"),
    ],
)
def test_every_form_of_sft_gives_the_same_tokens(load, record, settings, columns):
    tokenizer = byte_level(CORPUS, template=CHATML)
    dataset = load([record], "sft", tokenizer, **settings)
    assert texts(dataset, tokenizer)[1:] == ["The answer is 42.<|im_end|>"]
    assert texts(dataset, tokenizer)[0].endswith("12 + 30?<|im_end|>\n<|im_start|>assistant\n")
    assert dataset.columns.startswith(columns)


@pytest.mark.parametrize("bos", [False, True])
def test_text_is_all_completion(load, bos):
    tokenizer = byte_level(CORPUS, bos=bos, template=CHATML)
    dataset = load([{"text": "Hello there"}], "sft", tokenizer)
    assert dataset[0].prompt_ids.tolist() == ([0] if bos else [])
    assert texts(dataset, tokenizer)[1] == "Hello there</s>"


@pytest.mark.parametrize("record", [{"text": "TEXT"}, {"prompt": "", "completion": "TEXT"}])
def test_a_text_that_was_rendered_keeps_its_own_opening_and_end(load, record):
    """Its BOS is not learnt, nor is there a second end behind the line break that many templates write."""
    tokenizer = byte_level(CORPUS, bos=True)
    for text in ("<s>user: hi\nHello</s>", "<s>user: hi\nHello</s>\n", "user: hi\nHello"):
        written = {name: value.replace("TEXT", text) for name, value in record.items()}
        dataset = load([written], "sft", tokenizer)
        assert dataset[0].prompt_ids.tolist() == [0] and texts(dataset, tokenizer)[1] == "user: hi\nHello</s>"


def test_tokenised_records_are_taken_as_they_are(load):
    pair = {"prompt_ids": [5, 6, 7], "chosen_ids": [8, 9], "rejected_ids": [10], "chosen": "ignored"}
    example = load([pair], tokenizer=None, vocab_size=11)[0]
    assert [ids.tolist() for ids in (example.prompt_ids, *example.completions)] == [[5, 6, 7], [8, 9], [10]]
    example = load([{"prompt_ids": [], "completion_ids": [8, 9]}], "sft", None)[0]
    assert [ids.tolist() for ids in (example.prompt_ids, *example.completions)] == [[], [8, 9]]
    assert load([pair], "sft", None)[0].completions[0].tolist() == [8, 9]


@pytest.mark.parametrize("name", ["data.jsonl.gz", "data.parquet", "crlf.jsonl", "bom.jsonl"])
def test_every_file_format_gives_the_same_data(load, tmp_path, name):
    records = [{**PAIR, "chosen": f"Number {i} é"} for i in range(30)]
    chat = [{"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}]
    for rows in (records, chat * 3):
        expected = load(rows, chat_template=False)
        is_table = name.endswith(".parquet")
        path = write(tmp_path / name, [r | {"extra": 1.5} for r in rows] if is_table else rows)
        if name.startswith("crlf"):
            path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n") + b"\r\n\r\n")
        if name.startswith("bom"):
            path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
        settings = DataSettings(train=str(path), chat_template=False)
        dataset = load_dataset(str(path), settings, "preference", PLAIN, vocabulary=Vocabulary(1))
        assert dataset.digest == expected.digest and len(dataset) == len(rows)


def test_parquet_keeps_the_masks_and_figures_of_tokens(tmp_path):
    path, settings = tmp_path / "data.parquet", DataSettings(train=str(tmp_path / "data.parquet"))
    write(path, [{"prompt_ids": [5, 6], "completion_ids": [7, 8, 9], "completion_mask": [0, 0, 1]}])
    assert load_dataset(str(path), settings, "sft", None)[0].stored[1].tolist() == [~7, ~8, 9]
    group = {"prompt_ids": [5], "completion_ids": [[7, 8], [9]], "rewards": [1.0, 0.5], "logps": [[-1.0, -2.0], [0.0]]}
    write(path, [group | {"completion_mask": [[0, 1], [1]]}])
    groups = load_groups(settings, Vocabulary(vocab_size=48))
    assert groups[0].stored[1].tolist() == [~7, 8] and groups[0].rewards.tolist()[0] == 1.0
    assert groups[0].sampling_logps[0].tolist() == [-1.0, -2.0]


def test_parquet_leaves_a_message_without_the_fields_it_lacks(load, tmp_path):
    """Parquet fills them with null; a renderer that asks whether one is there has to hear no."""

    def render(messages: list[dict[str, Any]], **_: Any) -> str:
        return "".join(f"{sorted(message)}{message['content']}" for message in messages)

    tokenizer = TokenizerWrapper(byte_level(CORPUS), chat_template=render)
    rows = [{"messages": [USER, GOOD]}, {"messages": [USER | {"name": "x"}, GOOD]}]
    path = write(tmp_path / "data.parquet", rows)
    dataset = load_dataset(str(path), DataSettings(train=str(path)), "sft", tokenizer, vocabulary=Vocabulary(1))
    assert dataset.digest == load(rows, "sft", tokenizer).digest
    assert texts(dataset, tokenizer)[1] == "['content', 'role']The answer is 42.</s>"


# -------------------------------------------------------------------------------- dataset, digest, truncation


def test_rows_are_indices_and_lengths_are_what_the_model_sees(load):
    dataset = load([PAIR, PAIR | {"chosen": "Blue, or red, or blue, or red."}])
    assert [example.row for example in dataset] == [0, 1] and len(dataset) == 2
    for example, length in zip(dataset, dataset.lengths, strict=True):
        assert length == len(example.prompt_ids) + max(map(len, example.completions)) - 1
    with pytest.raises(IndexError):
        dataset[2]


def test_scored_tokens_are_what_a_batch_scores(load):
    pair = {"prompt_ids": [5], "chosen_ids": [8, 9], "rejected_ids": [10]}
    dataset = load([pair, pair | {"prompt_ids": [], "rejected_ids": [10, 11, 12]}], tokenizer=None)
    assert dataset.scored_tokens.tolist() == [[2, 1], [1, 2]]
    assert collate(list(dataset), 1, False).mask.sum(axis=2).tolist() == dataset.scored_tokens.tolist()


def test_the_digest_covers_all_that_makes_the_tokens(load):
    records = [PAIR, PAIR | {"prompt": "Name a colour."}]
    same = load(records).digest
    others = [
        load(records[::-1]).digest,
        load(records[:1]).digest,
        load(records, max_length=int(load(records).lengths.max())).digest,
        load(records, tokenizer=byte_level(CORPUS, bos=True)).digest,
        load(records, tokenizer=byte_level(CORPUS, template=CHATML)).digest,
        load(records, "sft").digest,
    ]
    assert load(records).digest == same and len({same, *others}) == 7
    # The boundary between prompt and completion counts, not only the tokens.
    ids = [{"prompt_ids": [5, 6], "completion_ids": [7, 8]}, {"prompt_ids": [5], "completion_ids": [6, 7, 8]}]
    assert load(ids[:1], "sft", None).digest != load(ids[1:], "sft", None).digest


tokens = st.lists(st.integers(1, 50), max_size=40)


@given(st.integers(2, 32), tokens, st.lists(tokens.filter(len), min_size=1, max_size=2), st.booleans())
@hypothesis_example(16, list(range(1, 9)), [list(range(1, 16))], True)
def test_truncation_keeps_the_prompts_end_and_the_completions_beginning(limit, prompt, completions, bos):
    prompt = ([0] if bos else []) + prompt
    short, cut, is_cut = truncate(prompt, completions, limit, 0)
    assert len(short) + max(map(len, cut)) <= limit
    assert is_cut == (len(prompt) + max(map(len, completions)) > limit)
    assert is_cut or (short, cut) == (prompt, completions)
    body = short[1:] if bos and short else short
    assert prompt[len(prompt) - len(body) :] == body
    assert not (bos and short) or short[0] == 0
    assert all(whole[: len(part)] == part and part for whole, part in zip(completions, cut, strict=True))
    if is_cut:  # Nothing is given away: the limit is reached, and the prompt keeps its quarter.
        assert len(short) + max(map(len, cut)) == limit
        assert len(short) >= min(len(prompt), max(1, limit // 4))
    if any(part != whole for part, whole in zip(cut, completions, strict=True)):
        assert len(short) == min(len(prompt), max(1, limit // 4))


# -------------------------------------------------------------------------------------------------- bad input


# What is wrong, and what the line says of it.
BAD_RECORDS: dict[str, list[tuple[Any, ...]]] = {
    "preference": [
        (b'{"prompt": "a", "chosen": ', "broken JSON at column 26: Expecting value"),
        (b'{"prompt": "\xff"}', "not valid UTF-8: byte 0xff at column 13"),
        (b'{"prompt": "a", "chosen": "b", "chosen": "d"}', "key 'chosen' is there twice in one object; keep one"),
        ([PAIR], "a list instead of a JSON object"),  # LlamaFactory#8323: StopIteration
        (PAIR | {"system": [USER]}, "'system'"),  # trl#2385: dropped
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [USER]}, "'rejected'"),  # trl#2385: trained
        ({"prompt": "a", "chosne": "b", "rejected": "c"}, "(columns: prompt, chosne", "data.columns={chosen: COLUMN"),
        (PAIR | {"prompt": 3}, "column 'prompt' is a number"),
        (PAIR | {"chosen": None}, "column 'chosen' is null"),
        (PAIR | {"prompt": []}, "'prompt' is an empty list"),
        (PAIR | {"prompt": [USER, GOOD]}, "the prompt ends with an assistant message"),
        (PAIR | {"prompt": [USER], "rejected": [GOOD]}, "data.chat_template=FILE"),
        (PAIR | {"rejected": " \n"}, "empty completion: 'rejected' is blank"),
        ({"prompt_ids": [], "chosen_ids": [5], "rejected_ids": [6, 7]}, "one token and no prompt"),
        ({"prompt": "x?", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "not in the conversation"),
        (
            PAIR | {"chosen": [USER | {"content": "Else?"}, USER, GOOD]},
            "'chosen' has 3 messages that do not begin with the prompt",
        ),
        (PAIR | {"prompt": "word " * 99}, "the prompt alone has", "data.max_length=64; raise it"),
        ({"prompt_ids": [1], "chosen_ids": [2]}, "rejected_ids: Input should be a valid list, not None"),
        ({"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [2]}, "the same tokens"),
        (
            {"prompt_ids": [1] * 40, "chosen_ids": [2] * 64, "rejected_ids": [2] * 63},
            "the same tokens, within data.max_length=64",
        ),
    ],
    "sft": [
        (b'{"messages": [{"role": "user", "role": "assistant", "content": "a"}]}', "key 'role' is there twice"),
        ({"completion": "b", "instruction": "a"}, "no column 'prompt'", "data.columns={prompt: COLUMN}"),
        ({"messages": [GOOD]}, "one message"),
        ({"messages": "hi"}, "'messages' is a string"),
        (
            {"prompt_ids": [1], "completion_ids": [2, -1]},
            "completion_ids[1]: Input should be greater than or equal to 0, not -1",
        ),
        ({"prompt_ids": [True], "completion_ids": [2]}, "prompt_ids[0]: Input should be a valid integer, not True"),
        ({"prompt_ids": [1], "completion_ids": []}, "empty completion: 'completion_ids'"),
        ({"prompt_ids": [1], "completion_ids": [999]}, "token id 999 is not below the vocabulary's size, 500"),
    ],
}
CASES = [(bad, kind, words) for kind, cases in BAD_RECORDS.items() for bad, *words in cases]


@pytest.mark.parametrize("bad, kind, words", CASES, ids=lambda value: str(value)[:40])
def test_an_unusable_record_is_named_with_its_line_and_left_out_on_request(load, tmp_path, bad, kind, words):
    good: dict[str, Any] = PAIR if kind == "preference" else {"prompt": "Hello", "completion": "there"}
    records = [good, b"", good, bad, good, bad]
    with pytest.raises(UserError) as error:
        load(records, kind, max_length=64, vocab_size=500)
    message = str(error.value)
    assert message.startswith(f"{tmp_path / 'data.jsonl'}:4: ") and "\n" not in message
    assert "; 2 records in all cannot be used" in message and "data.skip_invalid=true" in message
    for word in words:
        assert word in message
    dataset = load(records, kind, max_length=64, vocab_size=500, skip_invalid=True)
    assert len(dataset) == 3 and [example.row for example in dataset] == [0, 1, 2]
    assert [skipped.split(": ")[0].rsplit(":")[-1] for skipped in dataset.skipped] == ["4", "6"]
    assert dataset.skipped_count == 2
    with pytest.raises(UserError, match="none of its 1 records can be used"):
        load([bad], kind, max_length=64, vocab_size=500, skip_invalid=True)


def test_a_template_that_refuses_or_reshapes_a_conversation_is_named(load):
    records = [PAIR, {**PAIR, "prompt": [USER, USER]}, PAIR]
    alternating = byte_level(CORPUS, template=ALTERNATING)
    with pytest.raises(UserError, match=r"jsonl:2: the chat template refuses .*roles must alternate"):
        load(records, tokenizer=alternating)
    assert len(load(records, tokenizer=alternating, skip_invalid=True)) == 2
    reshaping = byte_level(CORPUS, template=ENDLESS.replace("'assistant: '", "'assistant: <think>'"))
    prompt, *answers = texts(load([PAIR], tokenizer=reshaping), reshaping)
    assert prompt == "user: What is 12 + 30?\nassistant: <think>"
    assert answers == ["The answer is 42.\n</s>", "Blue.\n</s>"]


def read_error(path: Path | str, tokenizer: Any = PLAIN, **settings: Any) -> str:
    options = DataSettings(train=str(path), **settings)
    with pytest.raises(UserError) as error:
        load_dataset(str(path), options, "preference", tokenizer, vocabulary=Vocabulary(1))
    assert "\n" not in str(error.value) and str(path) in str(error.value)
    return str(error.value)


def test_tables_and_lists_are_read_and_other_files_give_one_line(tmp_path):
    (tmp_path / "rows.csv").write_text("prompt,chosen,rejected\na,b,c\n")
    (tmp_path / "rows.json").write_text('[{"prompt": "a", "chosen": "b", "rejected": "c"}]')
    for name in ("rows.csv", "rows.json"):
        (row,) = record_files.read(str(tmp_path / name))
        assert row[1] == {"prompt": "a", "chosen": "b", "rejected": "c"}
    whole = write(tmp_path / "cut.jsonl.gz", [PAIR] * 300).read_bytes()
    for content in (whole[:-4], whole[:50] + b"xxxx" + whole[54:]):
        (tmp_path / "cut.jsonl.gz").write_bytes(content)
        assert "gzip" in read_error(tmp_path / "cut.jsonl.gz")


def test_text_needs_a_tokenizer_and_an_end_token(tmp_path):
    path = str(write(tmp_path / "train.jsonl", [PAIR]))
    assert "no tokenizer" in read_error(path, tokenizer=None)
    endless = byte_level(CORPUS)
    endless.eos_token = None
    with pytest.raises(UserError, match="no end token"):
        load_dataset(path, DataSettings(train=path), "preference", endless)


# ---------------------------------------------------------------------------------------------------- batches


def example(row: int, prompt: list[int], *completions: list[int]) -> Example:
    return Example(row, np.array(prompt, np.int32), tuple(np.array(ids, np.int32) for ids in completions))


ids = st.lists(st.integers(1, 99), min_size=1, max_size=30)
prompts = st.lists(st.integers(1, 99), max_size=30)


@given(st.lists(st.tuples(prompts, ids, ids), min_size=1, max_size=5), st.sampled_from([1, 8, 64]))
def test_whole_rows_score_every_completion_token_at_the_position_before_it(rows, multiple):
    batch = collate([example(7 + row, *parts) for row, parts in enumerate(rows)], multiple, shared_prompts=False)
    tokens = batch.tokens.reshape(2 * len(rows), -1)
    assert batch.rows.tolist() == [7 + row for row in range(len(rows))]
    assert batch.prefix_length == 0 and batch.suffix_indices is None and tokens.shape[1] % multiple == 0
    assert batch.logp_indices.shape == batch.mask.shape and batch.mask.shape[2] % multiple == 0
    sequences = [(prompt, completion) for prompt, *completions in rows for completion in completions]
    mask, logp_indices = (a.reshape(len(sequences), -1) for a in (batch.mask, batch.logp_indices))
    for index, (prompt, completion) in enumerate(sequences):
        whole = prompt + completion
        assert tokens[index].tolist()[: len(whole) - 1] == whole[:-1]
        assert not tokens[index, len(whole) - 1 :].any()
        scored = [(len(prompt) + c - 1, token) for c, token in enumerate(completion) if len(prompt) + c > 0]
        where = logp_indices[index, mask[index]]
        positions = batch.scored[where] - index * tokens.shape[1]
        assert list(zip(positions.tolist(), batch.targets[where].tolist(), strict=True)) == scored
        assert not logp_indices[index, ~mask[index]].any()
    assert batch.computed_tokens == batch.tokens.size


@given(st.integers(0, 100_000), st.sampled_from([1, 16, 64]), st.sampled_from([8, 16]))
def test_lengths_are_padded_little_and_to_few_shapes(length, multiple, steps):
    padded = pad_length(length, multiple, steps)
    assert padded >= max(length, 1) and padded % multiple == 0
    assert padded - length <= max(multiple, 2 * length / steps)
    assert pad_length(padded, multiple, steps) == padded


# --------------------------------------------------------------------------------------------------- prefetch


def prefetch_threads() -> int:
    return sum(thread.name.startswith("prefetch") for thread in threading.enumerate())


def test_prefetch_works_ahead_in_order_and_ends():
    made: list[int] = []
    source = (made.append(i) or i for i in range(20))  # type: ignore[func-returns-value]
    items = prefetch(source, 3)
    assert next(items) == 0
    deadline = time.monotonic() + 120
    while len(made) < 4 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    assert made == [0, 1, 2, 3]
    assert list(items) == list(range(1, 20)) and prefetch_threads() == 0
