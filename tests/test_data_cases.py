"""What users of other trainers reported, on our data: the right value, or a refusal that names the way on."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from lib.config.load import load as load_settings
from lib.config.settings import DataSettings, ModelSettings
from lib.data import inspect
from lib.data.dataset import load_dataset
from lib.data.encode import Encoder, chat_ids
from lib.data.groups import load_groups
from lib.data.record_formats import Columns, Plain, Unusable, answer_text, parse
from lib.data.sources import require_apart, with_splits
from lib.data.streaming import open_held_out, open_training
from lib.data.tokenizer import TextTokens, Vocabulary, load_tokenizer_of
from lib.errors import UserError
from lib.training.run_inputs import generate_options, read_inputs
from tests import chat_models, chat_rows, tiny
from tests.tiny import ROOT

NEMO = "mistralai-Mistral-Nemo-Instruct-2407"
PHI, QWEN = "microsoft-Phi-3.5-mini-instruct", "Qwen-Qwen2.5-7B-Instruct"
USER = {"role": "user", "content": "Where is shelf 0?"}
ANSWER = {"role": "assistant", "content": "In aisle 0."}
PAIR = {"prompt": "Shelf?", "chosen": "Aisle 3.", "rejected": "No."}


def write(path: Path, records: list[dict[str, Any]]) -> str:
    return str(tiny.write_jsonl(path, records))


def wrapped(name: str = QWEN, template: str | None = None) -> Any:
    tokenizer = chat_models.tokenizer_of(name, template)
    return chat_rows.encoder_of(tokenizer, chat_models.registry()[name]).tokenizer


def opened(
    tmp_path: Path, records: list[Any], kind: Any = "preference", tokenizer: Any = None, **settings: Any
) -> tuple[Any, list[str]]:
    """The data set of these records, and what is said of them."""
    said: list[str] = []
    data = DataSettings(train=write(tmp_path / "rows.jsonl", records), cache_dir=str(tmp_path / "cache"), **settings)
    return open_training(data, kind, tokenizer or wrapped(), tell=said.append), said


def pairs(name: str, count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{name} {i}?", "chosen": f"It is {i}.", "rejected": "No idea."} for i in range(count)]


def test_a_folder_of_train_valid_and_test_is_trained_held_out_and_left(tmp_path) -> None:
    for name, count in (("train", 8), ("valid", 2), ("test", 2)):
        write(tmp_path / "data" / f"{name}.jsonl", pairs(name, count))
    said: list[str] = []
    settings = DataSettings(train=str(tmp_path / "data"))
    train = open_training(settings, "preference", wrapped(), tell=said.append)
    valid = open_held_out(settings, "preference", wrapped(), tell=said.append)
    assert len(train) == 8 and valid is not None and len(valid) == 2
    assert said == [f"{tmp_path}/data: train.jsonl is trained, valid.jsonl is held out, test.jsonl is left"]
    assert with_splits(DataSettings(train=str(tmp_path / "data"), holdout=0.5)).valid is None


@pytest.mark.parametrize(
    "names, train, valid",
    [
        (("train/0.jsonl", "train/1.jsonl", "validation/0.jsonl"), 2, "validation/0.jsonl"),
        (("data/train-0.jsonl", "data/valid-0.jsonl"), 1, "data/valid-0.jsonl"),
        (("rows.jsonl", "test.jsonl"), 1, None),
        (("train.jsonl", "held_out.jsonl"), 1, "held_out.jsonl"),
        (("a.jsonl", "b.jsonl"), 0, None),
        (("test/0.jsonl", "valid.jsonl"), None, None),
    ],
)
def test_other_layouts_of_a_folder(tmp_path, names: tuple[str, ...], train: Any, valid: str | None) -> None:
    for name in names:
        write(tmp_path / "data" / name, pairs(name, 2))
    if train is None:  # mlx-lm's layout without what is trained: all of it was trained
        with pytest.raises(UserError, match=r"called valid or test; .*data\.train=FILE"):
            with_splits(DataSettings(train=str(tmp_path / "data")))
        return
    other = write(tmp_path / "other.jsonl", pairs("a", 2))
    found = with_splits(DataSettings(train={str(tmp_path / "data"): 2.0, other: 1.0}))  # one of several, with a weight
    files = [str(tmp_path / "data" / name) for name in names[:train]] or [str(tmp_path / "data")]
    assert found.train == dict.fromkeys(files, 2.0) | {other: 1.0}
    assert found.valid == (valid and {str(tmp_path / "data" / valid): 1.0})


@pytest.mark.parametrize("words", [["rollouts.rounds=1", "rollouts.prompts=2"], ["train.loss=grpo"]])
def test_a_folder_of_prompts_or_groups_is_split_as_well(tmp_path, words: list[str]) -> None:
    group = {"completion_ids": [[7, 1], [8, 9, 1]], "rewards": [1.0, 0.0]}
    for name, count in (("train", 5), ("valid", 2), ("test", 3)):
        write(tmp_path / "data" / f"{name}.jsonl", [{"prompt_ids": [i + 2, count]} | group for i in range(count)])
    words = [*words, f"data.train={tmp_path}/data", f"data.cache_dir={tmp_path}/cache"]
    model = [f"model.path={ROOT}/configs/quickstart/model", "evaluate.samples=0"]
    inputs = read_inputs(load_settings(None, [*model, *words]), print)
    assert len(inputs.data) == 5 and inputs.valid is None
    assert (inputs.held_out and len(inputs.held_out)) == (2 if "rollouts.rounds=1" in words else None)


@pytest.mark.parametrize("kind", ["preference", "prompt"])
def test_held_out_rows_among_the_training_rows_are_named_and_the_same_rows_stop_the_run(tmp_path, kind: Any) -> None:
    """Streamed ones as well, and prompts of rounds."""
    said: list[str] = []

    def check(*records: dict[str, Any]) -> None:
        paths = [write(tmp_path / f"{i}.jsonl", rows) for i, rows in enumerate((pairs("a", 6), [*records]))]
        cache = str(tmp_path / "cache")
        settings = DataSettings(train=paths[0], valid=paths[1], streaming=True, deduplicate=True, cache_dir=cache)
        require_apart(settings, kind, said.append)

    rows, is_pair = pairs("a", 2), kind == "preference"
    rows[1]["chosen"] = "Another answer."
    check(rows[0], *rows, *pairs("b", 2))  # a row that is there twice counts once
    first, second = f"{tmp_path}/1.jsonl:1", f"{tmp_path}/1.jsonl:3"
    assert [line.partition(": ")[2] for line in said] == [
        f"2 of 4 held-out rows have a prompt of the training data ({first}, {second})",
        f"{1 if is_pair else 2} of 4 held-out rows are rows of the training data "
        f"({first if is_pair else f'{first}, {second}'})",
    ]
    with pytest.raises(UserError, match=r"all 3 held-out rows are training rows of .*0\.jsonl.* data\.holdout="):
        check(*pairs("a", 3))


@pytest.mark.parametrize(
    "user, model", [("User", "Assistant"), ("human", "gpt"), ("Customer", "Bot"), ("USER", "model")]
)
def test_roles_of_other_formats_and_capitals_become_ours(tmp_path, user: str, model: str) -> None:
    ours, _ = opened(tmp_path, [{"messages": [USER, ANSWER]}], "sft")
    again, _ = opened(tmp_path, [{"messages": [{**USER, "role": user}, {**ANSWER, "role": model}]}], "sft")
    assert again.digest == ours.digest


def test_a_prompt_that_is_rendered_already_is_taken_as_it_is(tmp_path) -> None:
    system = {"role": "system", "content": "You are a clerk."}
    ours, _ = opened(tmp_path, [{"prompt": [system, USER], "chosen": "In aisle 0.", "rejected": "Unknown."}])
    text = "<|im_start|>system\nYou are a clerk.<|im_end|>\n<|im_start|>user\nWhere is shelf 0?<|im_end|>\n"
    row = {"prompt": f"{text}<|im_start|>assistant\n", "chosen": "In aisle 0.<|im_end|>\n", "rejected": "Unknown."}
    again, said = opened(tmp_path, [row])
    assert again.digest == ours.digest
    assert sum("not rendered again" in line for line in said) == 1
    as_text, said = opened(tmp_path, [{"text": f"{text}<|im_start|>assistant\nIn aisle 0.<|im_end|>"}], "sft")
    assert as_text[0].completions[0].tolist() == [*ours[0].prompt_ids, *ours[0].completions[0]]
    assert sum("not rendered again" in line for line in said) == 1
    for half in (PAIR | {"chosen": "<|im_start|>assistant\nYes."}, PAIR | {"prompt": [{**USER, "content": text}]}):
        with pytest.raises(UserError, match=r"rows\.jsonl:1: .* carries the chat template's marks already"):
            opened(tmp_path, [half])
    asks, said = opened(tmp_path, [PAIR | {"prompt": "What does <|im_start|> mean?"}])
    assert asks[0].prompt_ids.tolist()[0] == ours[0].prompt_ids.tolist()[0] and not said
    assert not opened(tmp_path, [{"text": "Once upon a time there was a shelf."}], "sft")[1]
    _, said = opened(tmp_path, [PAIR | {"prompt": "<start_of_turn>user\nShelf?"}])
    assert said == ["texts begin with <start_of_turn>, which the chat template does not have; it is rendered as text"]


@pytest.mark.parametrize(
    "name, prompt, end",
    [
        (QWEN, "<|im_start|>user\nShelf?<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>\n"),
        ("google-gemma-2-2b-it", "<bos><start_of_turn>user\nq<end_of_turn>\n<start_of_turn>model\n", "<end_of_turn>\n"),
        (NEMO, "<s>[INST]Shelf?[/INST]", "</s>"),
    ],
)
def test_rendered_answers_without_a_prompt_are_split_at_the_last_header(name: str, prompt: str, end: str) -> None:
    """orpo#7: chosen and rejected are the whole conversation, as text."""
    columns = Columns.of(DataSettings(train="-"))
    texts = [f"{prompt}{answer}{end}" for answer in ("Aisle 3.", "Aisle 4, no.")]
    for kind in ("preference", "sft"):
        row = parse(dict(zip(("chosen", "rejected"), texts, strict=True)), columns, kind)  # type: ignore[arg-type]
        assert isinstance(row, Plain) and row.prompt == prompt and row.completions[0] == f"Aisle 3.{end}"
        ids = Encoder(wrapped(name), DataSettings(train="-"), None).encoded(row)
        assert wrapped(name).decode(ids.prompt) == prompt
    for start in ("", "<|begin_of_text|>User: q\n\nAssistant:"):  # Llama 3's BOS before a text was the whole prompt
        with pytest.raises(Unusable, match="no column 'prompt'"):
            parse({"chosen": start + texts[0] * (not start), "rejected": f"{start}No."}, columns, "preference")


CHATML_ONLY = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}<|im_end|>\n{% endfor %}"
CHATML_ONLY += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = "<|im_start|>user\nShelf?<|im_end|>\n", "<|im_start|>assistant\n"


@pytest.mark.parametrize("bos", ["<|im_start|>", None])
def test_marks_are_known_where_bos_opens_each_turn_and_headers_where_a_text_begins_otherwise(
    tmp_path, bos: str | None
) -> None:
    """SmolLM2's BOS is the mark of a turn: its rendered prompts were rendered again. alignment-handbook#116: headers in
    the answers; reward-bench#140: answers that repeat their prompt."""
    tokenizer = wrapped()
    tokenizer._tokenizer.bos_token = bos
    encoder, (question, header) = Encoder(tokenizer, DataSettings(train="-"), None), CHATML
    for start, answer in (
        (question + header, "3."),
        (question, f"{header}3.<|im_end|>"),  # the header is the prompt's
        (question + header, f"{question}{header}3.<|im_end|>\n"),  # an answer that repeats its prompt
        (f"Short.{question}{header}", "3."),
    ):
        ids = encoder.encoded(Plain(start, (answer,), ""))
        assert tokenizer.decode(ids.prompt) == f"{'Short.' if start[0] == 'S' else ''}{question}{header}"
        assert tokenizer.decode(ids.completions[0]) == "3.<|im_end|>"
    assert [*encoder.notes] == ["texts carry the chat template's marks already: taken as they are, not rendered again"]
    encoder.encoded(Plain(question, ("3.",), ""))
    note = "rendered prompts do not end with '<|im_start|>assistant': their answers are learnt without it"
    assert [*encoder.notes][1:] == [note]
    with pytest.raises(Unusable, match="carries the chat template's marks already"):
        encoder.encoded(Plain("Shelf?<|im_end|>", ("3.",), ""))


@pytest.mark.parametrize(
    "name", ["GLM-4.7-Flash", "Qwen-Qwen3-0.6B", "Qwen3.5-4B", "deepseek-ai-DeepSeek-V3.1", NEMO, PHI]
)
@pytest.mark.parametrize("thinks", [True, False])
def test_rendered_prompts_of_templates_that_think_are_taken_as_they_are(name: str, thinks: bool) -> None:
    tokenizer = wrapped(name)
    options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": thinks}
    prompt = str(tokenizer.apply_chat_template([{"role": "system", "content": "Be terse."}, USER], **options))
    encoder = Encoder(tokenizer, DataSettings(train="-"), None)
    assert encoder.encoded(Plain(prompt, ("3.",), "")).prompt == encoder.tokens.ids(prompt)
    assert [*encoder.notes] == ["texts carry the chat template's marks already: taken as they are, not rendered again"]


@pytest.mark.parametrize(
    ("prompt", "answer", "note"),
    [
        ("Shelf?", "3.</s>", "answers end with </s>, which ends no turn of this model: it is learnt as text"),
        ("<image>\nShelf?", "3.", "texts hold <image>, and no media are trained on: it is rendered as text"),
        ("Q: shelf? A:", "Q: shelf? A: 3.", "answers begin with their whole prompt: what is learnt has it once more"),
        ("<s>[INST] Shelf? [/INST]", "3.", "texts begin with [INST], which the chat template does not have; it is"),
    ],
)
def test_what_is_learnt_as_text_and_means_more_elsewhere_is_said(prompt: str, answer: str, note: str) -> None:
    encoder = Encoder(wrapped(), DataSettings(train="-"), None)
    encoder.encoded(Plain(prompt, (answer,), ""))
    assert [line.startswith(note) for line in encoder.notes] == [True]


def test_tables_hold_messages_and_labels_as_text(tmp_path) -> None:
    """unsloth#2095, autotrain#707: pandas writes an index without a name and Python's repr of lists; JSON of messages was
    trained as the answer's text."""
    whole = [[USER, ANSWER], [USER, ANSWER | {"content": "No."}]]
    ours, _ = opened(tmp_path, [dict(zip(("chosen", "rejected"), whole, strict=True))])
    for spelt in (json.dumps, repr):
        cells = ['"' + spelt(messages).replace('"', '""') + '"' for messages in whole]
        (tmp_path / "rows.csv").write_text(f",chosen,rejected\n0,{','.join(cells)}\n")
        path = str(tmp_path / "rows.csv")
        data = load_dataset(path, DataSettings(train=path, cache_dir=str(tmp_path)), "preference", wrapped())
        assert data.digest == ours.digest
    columns = Columns.of(DataSettings(train="-"))
    for text, label in (("True", True), ("0", False)):
        assert parse({"prompt": "a", "completion": "b", "label": text}, columns, "unpaired").label is label  # type: ignore[union-attr]
    with pytest.raises(Unusable, match="neither JSON nor Python"):
        parse({"messages": "[{'role': 'user'}\n {'role': 'assistant'}]"}, columns, "sft")


def test_an_answer_that_is_a_list_of_messages_is_a_text_unless_it_holds_the_question(tmp_path) -> None:
    turns = [{"role": "user", "content": "Hi"}, ANSWER]
    for asked, answer, is_text in (("Write a chat.", turns, True), ("Hi", turns, False), ("Hi", [ANSWER], False)):
        read = parse({"prompt": asked, "completion": json.dumps(answer)}, Columns.of(DataSettings(train="-")), "sft")
        assert read.completions[0] == (json.dumps(turns) if is_text else [ANSWER])
    _, said = opened(tmp_path, [PAIR | {"chosen": json.dumps(turns)}])
    assert "answers are lists of messages as text: learnt as that text, not as turns" in said


def test_a_stream_of_the_hub_says_what_a_file_says(tmp_path) -> None:
    write(tmp_path / "train.parquet", [PAIR | {"prompt": f"<image> {i}?", "documents": ["a"]} for i in range(8)])
    said, vocabulary = dict[bool, list[str]](), Vocabulary(context=16)
    for streaming in (True, False):
        settings = DataSettings(train=f"hf://{tmp_path}", cache_dir=str(tmp_path / f"{streaming}"), streaming=streaming)
        tell = said.setdefault(streaming, []).append
        open_training(settings, "preference", wrapped(), tell=tell, vocabulary=vocabulary)
    assert said[True][1:] == said[False][1:] and len(said[True]) == 4


def test_a_folder_of_save_to_disk_is_read(tmp_path) -> None:
    import pyarrow

    table = pyarrow.Table.from_pylist(pairs("a", 3))
    for split in ("train", "test"):
        (tmp_path / "d" / split).mkdir(parents=True)
        with pyarrow.ipc.new_stream(str(tmp_path / "d" / split / "data-00000-of-00001.arrow"), table.schema) as writer:
            writer.write_table(table)
    (tmp_path / "d/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    settings = DataSettings(train=str(tmp_path / "d"), cache_dir=str(tmp_path / "cache"))
    ours, _ = opened(tmp_path, pairs("a", 3))
    assert open_training(settings, "preference", wrapped(), tell=print).digest == ours.digest


@pytest.mark.parametrize("name, end", [(PHI, "<|end|>"), (QWEN, "<|im_end|>")])
def test_a_turns_end_that_no_file_of_the_model_names_ends_answers(name: str, end: str) -> None:
    """Phi's template writes its tokenizer's end token behind it; Qwen's is added as a token that is not special."""
    tokenizer = chat_models.tokenizer_of(name)
    tokenizer.eos_token = "<|endoftext|>"
    if name == QWEN:
        tokenizer.add_tokens([AddedToken(end, special=False, normalized=False)])
    encoder = Encoder(tokenizer, DataSettings(train="-"), None)
    row = encoder.encoded(Plain("Shelf?", ("Aisle 3.",), ""))
    assert row.completions[0][-1] == tokenizer.convert_tokens_to_ids(end) in encoder.end_ids


def test_a_token_that_ends_a_part_of_a_turn_ends_no_answer() -> None:
    """Kimi-K3's <|close|> stands behind questions and answers, and after the thinking that an answer begins with."""
    template = "{% for m in messages %}<|open|>{{ m.role }}<|sep|>{% if m.role == 'assistant' %}<|close|>think<|sep|>"
    template += "{% endif %}{{ m.content }}<|close|>message<|sep|><|end_of_msg|>{% endfor %}"
    tokenizer = chat_models.build(template, {"kind": "byte_level", "eos": "<|end_of_msg|>"})
    encoder = Encoder(tokenizer, DataSettings(train="-"), None)
    answer = encoder.encoded(Plain("Shelf?", ("Aisle 3.",), "")).completions[0]
    assert encoder.end_ids == {answer[-1]} == {tokenizer.eos_token_id}


@pytest.mark.parametrize("text", ["\n42", "\n\n42", "  42", "42"])
def test_an_answer_that_begins_with_line_breaks_continues_a_text(text: str) -> None:
    """SentencePiece joins them with a line break before it: this ended in a traceback."""
    tokens = TextTokens(chat_models.build("", {"kind": "metaspace", "bos": "<s>", "eos": "</s>"}))
    assert tokens.tokenizer.decode([*tokens.ids("It is:"), *tokens.continued(text)]) == f"It is:{text}"


def test_an_answer_to_a_rendered_prompt_ends_as_the_template_ends_it() -> None:
    """Of a base whose own end token is another."""
    tokenizer = chat_models.tokenizer_of("google-gemma-2-2b-it")
    encoder = Encoder(tokenizer, DataSettings(train="-"), None)
    row = Plain("<bos><start_of_turn>user\nShelf?<end_of_turn>\n<start_of_turn>model\n", ("Aisle 3.",), "")
    assert encoder.encoded(row).completions[0][-1] == tokenizer.convert_tokens_to_ids("<end_of_turn>")
    bare = "{% for m in messages %}{{ m.content + (' [/INST]' if m.role == 'user' else '') }}{% endfor %}"
    encoder = Encoder(wrapped(NEMO, bare), DataSettings(train="-"), None)  # Mistral's early ones mark no system prompt
    encoder.encoded(Plain("Be terse.\n\n[INST] Shelf? [/INST]", ("3.",), ""))
    assert "not rendered again" in next(iter(encoder.notes))


@pytest.mark.parametrize(
    "name, value", [("chat_history", [["a", "b"]]), ("documents", [{"text": "t"}]), ("system_message", "A clerk.")]
)
def test_a_column_that_nothing_reads_is_named_once(tmp_path, name: str, value: object) -> None:
    _, said = opened(tmp_path, [*pairs("a", 70), *[PAIR | {name: value, "score": 3}] * 3])
    assert said == [f"columns that nothing reads: {name}; data.ignore=[{name}] says that this is meant"]
    assert opened(tmp_path, [PAIR | {name: value}], ignore=(name,))[1] == []


@pytest.mark.parametrize(
    "name, value",
    [("pictures", ["a.png"]), ("videos", ["a.mp4"]), ("scene", {"path": "a.wav"})]
    + [("attachments", [{"type": "image_url", "url": "https://a/b"}]), ("clip", "s3://a/b.mkv")]
    + [("thumbnail", "https://a/b.jpg?size=2"), ("logo", "data:image/png;base64,iVBORw0KGgo=")]
    + [("voice", {"array": [0.1], "sampling_rate": 16000}), ("pixel_values", [[0.1]])]
    + [("page_image", "iVBORw0KGgo="), ("scan", "/9j/4AAQSkZJRg=="), ("pic", {"bytes": "aGk=", "path": None})]
    + [("parts", [{"type": "text", "text": "a"}, {"type": "image", "image": "b"}])],
)
def test_media_stop_the_run(tmp_path, name: str, value: object) -> None:
    ids = {"prompt_ids": [5], "chosen_ids": [6], "rejected_ids": [7]}
    for row in (PAIR, ids):
        with pytest.raises(UserError, match=rf"rows\.jsonl:1: column '{name}' .*data\.ignore=\[{name}\]"):
            opened(tmp_path, [row | {name: value}])
    with pytest.raises(UserError, match=rf"rows\.jsonl:100: column '{name}' "):
        opened(tmp_path, [*pairs("a", 99), PAIR | {name: value}])


@pytest.mark.parametrize(
    "ids, rewards, mask",
    [([[8, 1], [9, 1]], [None, None], 1), ([[8, 1]], [1.0], 1), ([[8], [9]], [2.0, 2.0], 1)]
    + [([[8, 1]] * 2 + [[9, 1]], [1.0, 0.0, None], 1), ([[8, 1], [9, 1]], [1.0, 0.0], 0)],
)
def test_groups_of_which_nothing_can_be_learnt_say_so(tmp_path, ids: Any, rewards: Any, mask: int) -> None:
    row = {"prompt_ids": [5], "completion_ids": ids, "rewards": rewards}
    path = write(tmp_path / "g.jsonl", [row | {"completion_mask": [[mask] * len(each) for each in ids]}] * 2)
    with pytest.raises(UserError, match="nothing can be learnt of its 2 groups"):
        load_groups(DataSettings(train=path), Vocabulary())


def test_rows_much_longer_than_the_models_positions_are_told(tmp_path) -> None:
    said: list[str] = []
    settings = DataSettings(train=write(tmp_path / "rows.jsonl", [PAIR | {"prompt": "shelf " * 300}]))
    open_training(settings, "preference", wrapped(), tell=said.append, vocabulary=Vocabulary(context=64))
    assert len(said) == 1 and "max_position_embeddings of 64" in said[0] and "data.max_length=64" in said[0]


def test_marks_that_are_no_tokens_are_named() -> None:
    template = (chat_models.FOLDER / f"{QWEN}.jinja").read_text()
    tokenizer = chat_models.tokenizer_of("google-gemma-2-2b-it", template.replace("<|im_", "<|turn_"))
    about = chat_models.registry()["google-gemma-2-2b-it"]
    plain = chat_models.build("", about)
    plain.chat_template = tokenizer.chat_template
    (note,) = chat_rows.encoder_of(plain, about).notes
    assert "<|turn_start|>" in note and "<|turn_end|>" in note
    plain.chat_template = "{% for m in messages %}<turn>[INST] {{ m.content }}</s>{% endfor %}"
    assert [": </s>, <turn>; it" in note for note in chat_rows.encoder_of(plain, about).notes] == [True]


@pytest.mark.parametrize(
    ("answer", "text"),
    [(72.0, "72"), (0.5, "0.5"), (7, "7"), (" a ", "a"), (True, None), (float("nan"), None), ("", None)],
)
def test_an_answer_that_a_table_made_a_float_is_the_number_that_it_was(answer: object, text: str | None) -> None:
    assert answer_text({"answer": answer}) == text


@pytest.mark.parametrize("settings, words", [({"holdout": 1e-9}, r"data\.valid=FILE"), ({}, "fix the file$")])
def test_advice_works(tmp_path, settings: dict[str, Any], words: str) -> None:
    rows = pairs("a", 3) if settings else [{"prompt": "a", "chosen": None, "rejected": "b"}] * 3
    path = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(UserError, match=words):
        open_held_out(DataSettings(train=path, **settings), "preference", wrapped(), tell=print)
        load_dataset(path, DataSettings(train=path), "preference", wrapped())


def test_a_prompt_is_rendered_as_training_rows_are_and_answers_end_where_they_do(tmp_path) -> None:
    tokenizer = wrapped()
    encoder = Encoder(tokenizer, DataSettings(train="-"), None)
    developer = {"role": "developer", "content": "Be terse."}
    text = tokenizer.decode(chat_ids(encoder, [developer, USER], chat_rows.TOOLS))  # type: ignore[list-item]
    assert "<|im_start|>system\nBe terse." in text and "get_weather" in text
    data, _ = opened(tmp_path, [PAIR | {"prompt": [USER]}])
    assert chat_ids(encoder, [USER]) == data[0].prompt_ids.tolist()  # type: ignore[list-item]
    assert data[0].completions[0][-1] in encoder.end_ids
    with pytest.raises(UserError, match="unknown role 'wizard'"):
        chat_ids(encoder, [{"role": "wizard", "content": "a"}])
    deaf = "{% for m in messages if m.role != 'tool' %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    encoder = Encoder(wrapped(template=deaf), DataSettings(train="-"), None)
    with pytest.raises(UserError, match="leaves out the content of a message from 'tool'"):  # the question has it, too
        chat_ids(encoder, [{"role": "user", "content": "Is it 42?"}, ANSWER, {"role": "tool", "content": "42"}])


def test_tokens_are_written_as_training_takes_them(tmp_path, capsys) -> None:
    model, out = str(tiny.ROOT / "configs/quickstart/model"), tmp_path / "out.jsonl"
    path = write(tmp_path / "rows.jsonl", pairs("a", 3))
    assert inspect.main(["--tokens", str(out), "--model", model, path, "data.max_length=64"]) == 0
    lines, settings = tiny.read_jsonl(out), DataSettings(train=str(out))
    assert len(lines) == 3
    assert set(lines[0]) == {"prompt_ids", "chosen_ids", "rejected_ids", "chosen_mask", "rejected_mask"}
    again = load_dataset(str(out), settings, "preference", None)
    lines[0]["chosen_mask"][0] = 0  # masks are read as they are written
    masked = load_dataset(write(out, lines), settings, "preference", None)[0]
    assert masked.learnt is not None
    assert masked.learnt[0].tolist() == [False] + [True] * (len(again[0].completions[0]) - 1)
    assert [row.prompt_ids.tolist() for row in again] == [line["prompt_ids"] for line in lines]


def learnt_text(data: Any, k: int = 0, name: str = QWEN) -> str:
    return str(wrapped(name).decode(data[0].completions[k][data[0].masks[k]].tolist()))


def test_the_end_of_turn_is_learnt_where_padding_is_the_same_token(tmp_path) -> None:
    """trl#6357, Megatron-Bridge#4265: a mask by the id of padding took the end of turn out."""
    tokenizer = wrapped()
    tokenizer._tokenizer.pad_token = tokenizer.eos_token
    data, _ = opened(tmp_path, [{"messages": [USER, ANSWER]}], "sft", tokenizer)
    assert learnt_text(data) == "In aisle 0.<|im_end|>"


SYSTEM = {"role": "system", "content": "Short."}
WRONG = ANSWER | {"content": "Wrong."}


@pytest.mark.parametrize(
    "turns, learn, text",
    [
        # Megatron-Bridge#3359: without {% generation %} the whole conversation was learnt.
        ([USER, ANSWER, USER, ANSWER], "assistant", "In aisle 0.<|im_end|>In aisle 0.<|im_end|>"),
        # Megatron-Bridge#5213: the first token behind a turn's end was lost, as if that end were padding.
        ([SYSTEM, USER, ANSWER], "all", "<|im_start|>system\nShort.<|im_end|>\n<|im_start|>user\n"
         "Where is shelf 0?<|im_end|>\n<|im_start|>assistant\nIn aisle 0.<|im_end|>"),
        # axolotl#1703, #1756: a wrong answer that was marked so was learnt.
        *(([USER, WRONG | {name: False}, USER, ANSWER | {name: True}], "last", "In aisle 0.<|im_end|>")
          for name in ("weight", "train", "loss_weight")),
    ],
)  # fmt: skip
def test_what_is_learnt_of_a_chat(tmp_path, turns: list[Any], learn: str, text: str) -> None:
    data, _ = opened(tmp_path, [{"messages": turns}], "sft", learn=learn)
    assert learnt_text(data) == text


@pytest.mark.parametrize("limit", [56, 64])
def test_a_short_answer_stays_whole_beside_one_that_is_cut(tmp_path, limit: int) -> None:
    """trl#6548: both were cut by the longer one's length, the shorter one to nothing (NaN in SimPO)."""
    data, _ = opened(tmp_path, [PAIR | {"chosen": "Aisle 3, on the left. " * 50}], max_length=limit)
    (row,) = data
    assert [len(row.prompt_ids) + len(ids) for ids in row.completions][0] == limit
    assert learnt_text(data, k=1) == "No.<|im_end|>"


def test_bos_stands_once_where_tokenizer_and_template_both_write_it(tmp_path) -> None:
    """Soup#781: a rendered prompt was tokenised with special tokens once more."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = wrapped("meta-llama-Llama-3.1-8B-Instruct")
    bos = tokenizer.bos_token_id
    tokenizer._tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{tokenizer.bos_token} $A", special_tokens=[(tokenizer.bos_token, bos)]
    )
    data, _ = opened(tmp_path, [PAIR], tokenizer=tokenizer)
    prompt = chat_ids(Encoder(tokenizer, DataSettings(train="-"), None), [{"role": "user", "content": "Shelf?"}])
    assert data[0].prompt_ids.tolist() == prompt and prompt.count(bos) == 1


def test_arguments_as_text_are_those_of_an_object(tmp_path) -> None:
    """oumi#2599, flama#258: JSON text was written as a JSON string, with its quotes escaped."""
    ids = []
    for arguments in ({"city": "Oslo"}, '{"city": "Oslo"}'):
        call = {"type": "function", "function": {"name": "get_weather", "arguments": arguments}}
        answer = {"role": "assistant", "content": None, "tool_calls": [call]}
        data, _ = opened(tmp_path, [{"messages": [USER, answer], "tools": chat_rows.TOOLS}], "sft")
        assert '"arguments": {"city": "Oslo"}' in learnt_text(data)
        ids.append(data[0].completions[0].tolist())
    assert ids[0] == ids[1]


def test_a_short_question_under_a_system_prompt_is_not_learnt(tmp_path) -> None:
    """Mistral Nemo's template has the system prompt in the last question alone: "Hi?[/INST]" was the answer's begin."""
    row = {"prompt": [{"role": "system", "content": "S."}, {"role": "user", "content": "Hi?"}], "chosen": "Yes."}
    data, _ = opened(tmp_path, [row | {"rejected": "No."}], tokenizer=wrapped(NEMO))
    prompt = wrapped(NEMO).decode(data[0].prompt_ids.tolist())
    assert (prompt, learnt_text(data, name=NEMO)) == ("<s>[INST]S.\n\nHi?[/INST]", "Yes.</s>")


@pytest.mark.parametrize("name", ["Qwen-Qwen3-0.6B", "openai-gpt-oss-120b", "GLM-4.7-Flash"])
def test_thinking_that_is_blank_is_none(tmp_path, name: str) -> None:
    """Nemotron#240: prompts opened a block of thinking, and gpt-oss learnt an empty channel."""
    plain = {"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER | {"content": "No."}]}
    ours, _ = opened(tmp_path, [plain], tokenizer=wrapped(name))
    for blank in ("", "\n\n", None):
        row = plain | {"chosen": [ANSWER | {"reasoning_content": blank}]}
        assert opened(tmp_path, [row], tokenizer=wrapped(name))[0].digest == ours.digest
    thinks, _ = opened(tmp_path, [plain | {"chosen": [ANSWER | {"reasoning_content": "Hm."}]}], tokenizer=wrapped(name))
    if name.startswith("GLM"):  # an answer without thinking closes the block that its prompt opens
        closed = thinks[0].completions[1].tolist()
        assert wrapped(name).decode(closed).startswith("</think>No.") and not thinks[0].masks[1][0]


def test_two_calls_of_one_function_are_both_learnt_or_refused(tmp_path) -> None:
    """gpt-oss's template writes the first one alone, and its result's header names the function, too."""
    city = [{"name": "get_weather", "arguments": {"city": name}} for name in ("Oslo", "Rome")]
    calls = [{"id": f"call1234{i}", "type": "function", "function": function} for i, function in enumerate(city)]
    results = [{"role": "tool", "tool_call_id": c["id"], "name": "get_weather", "content": "rain"} for c in calls]
    turns = [USER, {"role": "assistant", "content": None, "tool_calls": calls}, *results, ANSWER]
    row, qwen3 = {"messages": turns, "tools": chat_rows.TOOLS}, "Qwen-Qwen3-0.6B"
    adding = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    asked = [{"role": "user", "content": "Please add a = 1 and b = 2."}, turns[1] | {"tool_calls": [adding]}]
    for messages in ([*asked, results[0], ANSWER], asked):  # one-word names that stand in the question as well
        with pytest.raises(UserError, match=r"leaves out ('tool_calls' of|the call of 'add')"):
            opened(tmp_path, [{"messages": messages}], "sft", wrapped("meta-llama-Llama-3.2-3B-Instruct", CHATML_ONLY))
    with pytest.raises(UserError, match="leaves out the arguments of the call of 'get_weather'"):
        opened(tmp_path, [row], "sft", wrapped("openai-gpt-oss-120b"), learn="assistant")
    text = "".join(f"<tool_call>\n{json.dumps(each)}\n</tool_call>\n" for each in city).rstrip()
    data, _ = opened(tmp_path, [row], "sft", wrapped(qwen3), learn="assistant")
    assert learnt_text(data, name=qwen3) == f"{text}<|im_end|>In aisle 0.<|im_end|>"


def test_the_last_of_several_answers_ends_where_the_template_writes_no_end(tmp_path) -> None:
    """trl#1623: behind the blanks that Alpaca's template writes no end was learnt."""
    template = "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
    (tmp_path / "alpaca.jinja").write_text(template + "{% if add_generation_prompt %}### assistant:\n{% endif %}")
    row = {"messages": [USER, {"role": "assistant", "content": "Aisle 3"}] * 2}
    settings = {"chat_template": str(tmp_path / "alpaca.jinja")}
    for learn, learnt in (("assistant", "Aisle 3Aisle 3\n\n<|im_end|>"), ("last", "Aisle 3\n\n<|im_end|>")):
        assert learnt_text(opened(tmp_path, [row], "sft", learn=learn, **settings)[0]) == learnt


def test_two_turns_of_one_speaker_are_both_read(tmp_path) -> None:
    """LlamaFactory#2962: only strict alternation was taken."""
    turns = [("human", "Hi."), ("human", "Shelf?"), ("gpt", "Aisle 3.")]
    data, _ = opened(tmp_path, [{"conversations": [{"from": who, "value": text} for who, text in turns]}], "sft")
    assert "user\nHi.<|im_end|>\n<|im_start|>user\nShelf?<|im_end|>" in wrapped().decode(data[0].prompt_ids.tolist())


def test_an_answer_to_a_run_ends_at_the_templates_end_of_turn(tmp_path) -> None:
    """LlamaFactory#7454, in a run without questions: its tokenizer stops where training put the end."""
    tokenizer = chat_models.tokenizer_of(QWEN)
    folder = tiny.model_folder(tmp_path / "model", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(folder)
    words = [f"model.path={folder}", "model.random_init=true", f"data.train={write(tmp_path / 'rows.jsonl', [PAIR])}"]
    inputs = read_inputs(load_settings(None, words), print)
    assert inputs.tokenizer is not None
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in inputs.tokenizer.eos_token_ids


ON = ("--chat-template-config", '{"enable_thinking": false}')


@pytest.mark.parametrize(
    ("name", "end", "template", "words"),
    [
        (QWEN, "<|im_end|>", True, ()),
        (QWEN, "<|endoftext|>", True, ("--extra-eos-token", "<|im_end|>")),
        (QWEN, "<|im_end|>", False, ("--ignore-chat-template",)),
        ("Qwen-Qwen3-0.6B", "<|endoftext|>", True, ("--extra-eos-token", "<|im_end|>", *ON)),
        (QWEN, "<|endoftext|>", "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}", None),
    ],
)
def test_mlx_lms_generate_gets_the_words_that_make_it_render_and_end_as_training(
    tmp_path, name: str, end: str, template: Any, words: Any
) -> None:
    """In the `try it` line and the cards; no word gives it another template."""
    tokenizer = chat_models.tokenizer_of(name)
    tokenizer.eos_token = end
    model = tiny.model_folder(tmp_path / "model", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    tokenizer.save_pretrained(model)
    if isinstance(template, str):
        (tmp_path / "mine.jinja").write_text(template)
        template = str(tmp_path / "mine.jinja")
    settings, data = ModelSettings(path=str(model)), DataSettings(train="-", chat_template=template)
    assert generate_options(load_tokenizer_of(settings), settings, data) == (words if words is None else [*words])
    config = json.loads((model / "config.json").read_text())
    for bits, given in ((4, words), (3, None)):  # mlx-lm#165: DoRA on 3, 5 or 6 bits
        (model / "config.json").write_text(json.dumps(config | {"quantization": {"bits": bits, "group_size": 64}}))
        dora = settings.model_copy(update={"method": "dora"})
        assert generate_options(load_tokenizer_of(dora), dora, data) == (given if given is None else [*given])
