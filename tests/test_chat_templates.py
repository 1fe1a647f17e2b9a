"""Chat templates of real models: our token ids against TRL's, whole conversations, thinking, ends of turns."""

import datetime
import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lib.config.load import load as load_settings
from lib.config.settings import DataSettings
from lib.data.batch import collate
from lib.data.dataset import Dataset, load_dataset
from lib.data.encode import Encoder
from lib.data.inspect import facts_of
from lib.data.record_formats import Chat, Tokens, Unusable
from lib.data.streaming import open_training
from lib.data.tokenizer import load_tokenizer_of
from lib.errors import UserError
from tests import chat_models, chat_rows, tiny

GOLDEN: dict[str, Any] = json.loads(gzip.decompress((chat_models.FOLDER / "golden.json.gz").read_bytes()))
NAMES = list(chat_models.registry())
MARKED = [name for name in NAMES if name.endswith("_training")]
# docs/data.md names them: the template makes two turns of one message.
KNOWN = {"NVIDIA-Nemotron-Nano-v2": {"tool call, said too"}}
USER = {"role": "user", "content": "What is 12 + 30?"}
GOOD = {"role": "assistant", "content": "The answer is 42."}
BAD = {"role": "assistant", "content": "Blue."}


def encoder_of(name: str, template: str | None = None, **settings: Any) -> Encoder:
    about = chat_models.registry()[name]
    return chat_rows.encoder_of(chat_models.tokenizer_of(name, template), about, **settings)


def encode(name: str, chat: Chat, **settings: Any) -> Tokens | Unusable:
    return chat_rows.encode(encoder_of(name, **settings), chat)


def decoded(name: str, chat: Chat, **settings: Any) -> tuple[str, list[str], list[str]]:
    """Text of the prompt, of the completions, and of what is learnt of each."""
    made = encode(name, chat, **settings)
    assert isinstance(made, Tokens), made
    text = chat_models.tokenizer_of(name).decode
    learnt = made.learnt or [[True] * len(ids) for ids in made.completions]
    of_model = [[*itertools.compress(ids, mask)] for ids, mask in zip(made.completions, learnt, strict=True)]
    return text(made.prompt), [*map(text, made.completions)], [*map(text, of_model)]


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_the_whole_conversation(name):
    """By TRL 1.16 (golden.json.gz): what benchmarks/chat_templates.py counts is nothing but what is known."""
    tokenizer = chat_models.tokenizer_of(name)
    found = chat_rows.differences(name, tokenizer, chat_models.registry()[name], GOLDEN)
    assert set(found) == KNOWN.get(name, set()), found


TAGS = "{% if m.role == 'user' %}{{ '[INST] ' + m.content + 'SPACE[/INST]' }}{% else %}{{ ' ' + m.content + eos_token }}{% endif %}"
WRITTEN = {
    "Llama 2's": "{{ bos_token }}{% for m in messages %}" + TAGS.replace("SPACE", " ") + "{% endfor %}",
    "Mistral's": "{{ bos_token }}{% for m in messages %}" + TAGS.replace("SPACE", "") + "{% endfor %}",
}


@pytest.mark.parametrize("kind", ["metaspace", "metaspace-legacy", "metaspace-bare", "byte_level"])
@pytest.mark.parametrize("style", WRITTEN)
def test_a_space_before_an_answer_is_the_whole_conversations(style, kind):
    """SentencePiece writes it in three ways, which a completion that is tokenised apart gets wrong in one of them."""
    about = {"kind": kind, "bos": "<s>", "eos": "</s>"}
    tokenizer = chat_models.build(WRITTEN[style], about)
    encoder = chat_rows.encoder_of(tokenizer, about)
    for name, row in chat_rows.rows().items():
        if row["tools"] or "thinking" in name or "system" in name:
            continue
        made = chat_rows.encode(encoder, chat_rows.chat_of(row))
        assert isinstance(made, Tokens)
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        assert made.prompt == prompt, name
        for answer, ids in zip(row["completions"], made.completions, strict=True):
            whole = tokenizer.apply_chat_template(row["prompt"] + answer, return_dict=False)
            assert prompt + ids == whole, name


@pytest.mark.parametrize(
    "name, kind",
    [
        (name, kind)
        for name in MARKED
        for kind in ("single", "turns", "system and turns", "thinking in turns")
        if "error" not in GOLDEN[f"{name} {kind}"]  # Gemma's refuses system prompts
    ],
)
def test_what_a_template_marks_is_learnt_as_with_assistant_only_loss(name, kind):
    row, theirs = chat_rows.rows()[kind], GOLDEN[f"{name} {kind}"]
    messages = [*row["prompt"], *row["completions"][0]]
    first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    learnt = tuple(message["role"] == "assistant" for message in messages[first:])
    chat = Chat(messages[:first], (messages[first:],), "messages", (learnt,))
    made = encode(name, chat)
    if isinstance(made, Unusable):
        assert "leaves out" in str(made) and "reasoning_content" in str(made)
        return
    (ids,), mask = made.completions, (made.learnt or [[True] * len(made.completions[0])])[0]
    ours = [False] * len(made.prompt) + mask
    assert (made.prompt + ids)[: len(ours)] == theirs["wholes"][0][: len(ours)]
    wanted = [bool(bit) for bit in theirs["masks"][0]]
    assert ours == wanted[: len(ours)] and not any(wanted[len(ours) :])


@pytest.mark.parametrize("name", ["Qwen-Qwen3-0.6B", "Qwen3.5-4B", "deepseek-ai-DeepSeek-V3.1", "StepFun3.5-Flash"])
def test_an_empty_block_of_thinking_is_not_learnt(name):
    _, _, learnt = decoded(name, Chat([USER], ([GOOD], [BAD]), ""))
    assert all("think>" not in text for text in learnt) and learnt[0].startswith("The answer is 42.")


@pytest.mark.parametrize(
    "thought, said", [("12 + 30 makes 42", "The answer is 42."), ("2+2=4", "2+2=4, so the answer is 4.")]
)
def test_thinking_goes_on_from_the_prompt_that_opens_it(thought, said):
    """DeepSeek-R1's template drops it from every answer, which may repeat it; the model writes it all the same."""
    inline = {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\n{said}"}
    for name in ("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "Qwen-QwQ-32B"):
        for answer in ({"role": "assistant", "content": said, "reasoning_content": thought}, inline):
            prompt, (text,), learnt = decoded(name, Chat([USER], ([answer],), ""))
            assert prompt.endswith("<think>\n") and learnt == [text]
            assert text.startswith(f"{thought}\n</think>\n\n{said}<")


CALLED = {"role": "assistant", "content": "", "tool_calls": [chat_rows.CALL]}


@pytest.mark.parametrize(
    "name, answer, tools, lost",
    [
        ("meta-llama-Llama-3.1-8B-Instruct", {**GOOD, "reasoning_content": "42"}, None, "'reasoning_content'"),
        ("meta-llama-Llama-3.1-8B-Instruct", CALLED | {"content": "12 + 30"}, chat_rows.TOOLS, "the answer's content"),
        ("microsoft-Phi-3.5-mini-instruct", CALLED, chat_rows.TOOLS, "the call of 'get_weather'"),
    ],
)
def test_what_a_template_leaves_out_is_named_although_the_text_has_it_elsewhere(name, answer, tools, lost):
    made = encode(name, Chat([USER], ([answer],), "", tools=tools))
    assert isinstance(made, Unusable) and f"leaves out {lost}" in str(made)


@pytest.mark.parametrize(
    "field", [{"thoughts": "The answer"}, {"reasoning_details": [{"text": "a"}]}, {"extra": ["a"]}]
)
def test_a_field_of_an_answer_that_a_template_does_not_know_is_named(field):
    (name,) = field
    made = encode("Qwen-Qwen3-0.6B", Chat([USER], ([GOOD | field],), ""))
    assert isinstance(made, Unusable) and f"leaves out {name!r} of a message from 'assistant' (or" in str(made)
    template = "{% for m in messages %}{{ m.content }}{{ m." + name + " }}<|im_end|>{% endfor %}"
    encoder = encoder_of("Qwen-Qwen3-0.6B", template)
    assert isinstance(encoder.encoded(Chat([USER], ([GOOD | field],), "")), Tokens)


@pytest.mark.parametrize("name", ["google-gemma-2-2b-it", "mistralai-Mistral-Nemo-Instruct-2407"])
def test_a_system_prompt_that_a_template_does_not_take_opens_the_question(name):
    prompt, completions, _ = decoded(name, Chat([chat_rows.SYSTEM, USER], ([GOOD],), ""))
    assert "You are terse.\n\nWhat is 12 + 30?" in prompt
    assert completions[0].strip().startswith("The answer is 42.")


def test_turns_are_learnt_where_a_template_marks_none():
    name = "Qwen-Qwen2.5-7B-Instruct"
    messages = [GOOD, {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]
    both = decoded(name, Chat([USER], (messages,), "", ((True, False, True),)))
    sure = "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    assert both[1] == [f"The answer is 42.<|im_end|>{sure}Yes.<|im_end|>"]
    assert both[2] == ["The answer is 42.<|im_end|>Yes.<|im_end|>"]
    assert decoded(name, Chat([USER], (messages,), "", ((True, False, False),)))[2] == ["The answer is 42.<|im_end|>"]
    assert decoded(name, Chat([USER], (messages,), ""))[2] == ["Yes.<|im_end|>"]
    prompt, texts, learnt = decoded(name, Chat([USER], (messages,), "", ((True, True, True),)))
    assert learnt == texts and texts[0].endswith("Sure?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>")
    every = decoded(name, Chat([], ([USER, *messages],), "", ((True,) * 4,)))
    assert every[0] == "" and every[1] == every[2] == [prompt + texts[0]]


def test_every_message_is_learnt_where_a_template_marks_the_models_alone():
    chat = Chat([], ([USER, GOOD],), "", ((True, True),))  # data.learn=all
    for name in ("Qwen-Qwen2.5-7B-Instruct", "qwen2_5_training"):
        prompt, (text,), learnt = decoded(name, chat)
        assert prompt == "" and learnt == [text] and "What is 12 + 30?" in text, name


@pytest.mark.parametrize("name", [name for name in NAMES if name not in MARKED])
def test_every_turn_of_a_conversation_is_learnt_or_the_reason_is_given(name):
    said = [{"role": "assistant", "content": text} for text in ("First 1.", "Second 2.")]
    chat = Chat([USER], ([said[0], {"role": "user", "content": "Sure?"}, said[1]],), "", ((True, False, True),))
    made = encode(name, chat)
    if isinstance(made, Unusable):  # Hermes' template for tools takes no conversation without them
        assert "refuses" in str(made) and "tool_use" in name
        return
    _, _, (learnt,) = decoded(name, chat)
    assert "First 1." in learnt and "Second 2." in learnt and "Sure?" not in learnt and "+ 30" not in learnt
    assert made.completions[0][-1] in chat_models.end_ids(chat_models.tokenizer_of(name), chat_models.registry()[name])


@pytest.mark.parametrize(
    "name", ["Qwen-Qwen2.5-7B-Instruct", "google-gemma-2-2b-it", "microsoft-Phi-3.5-mini-instruct"]
)
def test_a_long_chat_loses_its_middle_messages(name, tmp_path):
    """What is left is, id for id, the shorter conversation: system prompt, opening tokens and last question in place."""
    spoken = itertools.product(range(8), ("user", "assistant"))
    turns = [{"role": role, "content": f"{number} " + "word " * 20} for number, role in spoken]
    encoder = encoder_of(name)
    prompts = [[chat_rows.SYSTEM, *turns[2 * (8 - kept) :], USER] for kept in range(9)]
    shorter = [encoder.encoded(Chat(prompt, ([GOOD], [BAD]), "")) for prompt in prompts]
    lengths = [len(short.prompt) + max(map(len, short.completions)) for short in shorter]
    file = tiny.write_jsonl(tmp_path / "rows.jsonl", [{"prompt": prompts[-1], "chosen": [GOOD], "rejected": [BAD]}])
    for short, length, next_length in zip(shorter, lengths, lengths[1:], strict=False):
        for limit in (length, next_length - 1):
            settings = DataSettings(train=str(file), max_length=limit)
            data = load_dataset(str(file), settings, "preference", encoder.tokenizer)
            assert data.truncated_count == 1 and data[0].prompt_ids.tolist() == short.prompt
            assert [ids.tolist() for ids in data[0].completions] == short.completions


def loaded(name: str, row: dict[str, Any], kind: Any, folder: Path, **settings: Any) -> tuple[Dataset, Any]:
    """A data set of one row, and what makes text of ids."""
    file = str(tiny.write_jsonl(folder / "rows.jsonl", [row]))
    wrapped = encoder_of(name).tokenizer
    return load_dataset(file, DataSettings(train=file, **settings), kind, wrapped), wrapped.decode


def one_row(*words: Any, **settings: Any) -> tuple[str, str]:
    """The prompt and the first completion of a row, as text."""
    data, text = loaded(*words, **settings)
    return text(data[0].prompt_ids.tolist()), text(data[0].completions[0].tolist())


def test_a_long_question_is_cut_at_its_beginning_and_stays_well_formed(tmp_path):
    question = {"role": "user", "content": " ".join(f"word{number}" for number in range(200)) + " and?"}
    row = {"prompt": [chat_rows.SYSTEM, question], "chosen": [GOOD], "rejected": [BAD]}
    data, text = loaded("Qwen-Qwen2.5-7B-Instruct", row, "preference", tmp_path, max_length=90)
    shown = text(data[0].prompt_ids.tolist())
    assert shown.startswith("<|im_start|>system\nYou are terse.<|im_end|>\n<|im_start|>user\nword1")
    assert shown.endswith(" word199 and?<|im_end|>\n<|im_start|>assistant\n") and 80 < data.lengths[0] <= 89


def test_a_long_conversation_loses_its_end_and_nothing_of_its_beginning(tmp_path):
    """Though its first question and the system prompt are more than a quarter of data.max_length."""
    name = "Qwen-Qwen3-0.6B"
    prompt = [{"role": "system", "content": "You are " + "very " * 30 + "terse."}, USER]
    turns = [{"role": "assistant", "content": f"{number} " + "word " * 20} for number in range(6)]
    messages = [*prompt, *(one for turn in turns for one in (turn, USER))][:-1]
    row = {"messages": messages, "tools": chat_rows.TOOLS}
    whole = "".join(one_row(name, row, "sft", tmp_path, learn="assistant", max_length=4096))
    shown, answer = one_row(name, row, "sft", tmp_path, learn="assistant", max_length=512)
    assert whole.startswith(shown + answer) and len(shown + answer) < len(whole) and "very terse." in shown
    assert f"user\n{USER['content']}<|im_end|>\n<|im_start|>assistant\n" in shown and "0 word" in answer


@pytest.mark.parametrize("answer", ["word " * 300, "word " * 30])
def test_a_long_system_prompt_stays_whole(tmp_path, answer):
    name = "Qwen-Qwen2.5-7B-Instruct"
    prompt = [{"role": "system", "content": "First " + "very " * 50 + "terse."}, GOOD | {"role": "user"}, GOOD, USER]
    row = {"prompt": prompt, "chosen": [GOOD | {"content": answer}], "rejected": [BAD]}
    shown, cut = one_row(name, row, "preference", tmp_path, max_length=200)
    assert shown.startswith("<|im_start|>system\nFirst very") and "very terse.<|im_end|>\n<|im_start|>user\n" in shown
    assert "The answer is 42." not in shown and shown.endswith("30?<|im_end|>\n<|im_start|>assistant\n")
    assert answer.startswith(cut.removesuffix("<|im_end|>"))


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused(tmp_path):
    prompt = [{"role": "system", "content": "very " * 75}, USER]
    row = {"prompt": prompt, "chosen": [GOOD | {"content": "word " * 30}], "rejected": [BAD]}
    for limit, words in (
        (180, "the prompt alone has 175 .* leaves less than 22 of data.max_length=180 "),
        (100, "less than 12 of"),
    ):
        with pytest.raises(UserError, match=words):
            one_row("Qwen-Qwen2.5-7B-Instruct", row, "preference", tmp_path, max_length=limit)


def test_arguments_of_the_settings_and_of_a_row():
    name = "Qwen-Qwen3-0.6B"
    chat = Chat([USER], ([GOOD],), "")
    assert decoded(name, chat)[0].endswith("<think>\n\n</think>\n\n")
    assert decoded(name, chat, chat_template_kwargs={"enable_thinking": True})[0].endswith("assistant\n")
    own = Chat([USER], ([GOOD],), "", template_arguments={"enable_thinking": True})
    assert decoded(name, own)[0].endswith("assistant\n")
    assert decoded(name, Chat([USER], (), ""))[0].endswith("</think>\n\n")


def test_arguments_and_files_that_are_not_a_templates_are_refused(tmp_path):
    (tmp_path / "bad.jinja").write_text("{% if %}")
    with pytest.raises(UserError, match=r"data\.chat_template: not a template: Expected an expression"):
        encode("Qwen-Qwen3-0.6B", Chat([USER], ([GOOD],), ""), chat_template=str(tmp_path / "bad.jinja"))
    with pytest.raises(UserError, match="data.chat_template_kwargs: 'tokenize'"):
        encode("Qwen-Qwen3-0.6B", Chat([USER], ([GOOD],), ""), chat_template_kwargs={"tokenize": True})
    made = encode("Qwen-Qwen3-0.6B", Chat([USER], ([GOOD],), "", template_arguments={"tools": []}))
    assert isinstance(made, Unusable) and str(made).startswith("chat_template_kwargs: 'tools'")
    with pytest.raises(UserError, match="data.chat_template=nowhere.jinja: cannot be read"):
        encode("Qwen-Qwen3-0.6B", Chat([USER], ([GOOD],), ""), chat_template="nowhere.jinja")


def test_a_template_of_a_file(tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}<|im_end|>{% endfor %}[assistant] ")
    prompt, completions, _ = decoded("Qwen-Qwen3-0.6B", Chat([USER], ([GOOD],), ""), chat_template=str(file))
    assert prompt == "[user] What is 12 + 30?<|im_end|>[assistant] " and completions == ["The answer is 42.<|im_end|>"]


def test_a_model_may_have_templates_by_name():
    """As Command-R has one for tools; each is given the day of the settings."""
    tokenizer = chat_models.tokenizer_of("meta-llama-Llama-3.2-3B-Instruct")
    dated = "{{ strftime_now('%Y') }}: {{ messages[0].content }}{% if tools %} TOOLS{% endif %}"
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": dated}
    encoder = chat_rows.encoder_of(tokenizer, chat_models.registry()["meta-llama-Llama-3.2-3B-Instruct"])
    plain, with_tools = (encoder.encoded(Chat([USER], (), "", tools=tools)) for tools in (None, chat_rows.TOOLS))
    assert isinstance(plain, Tokens) and isinstance(with_tools, Tokens)
    assert "<|start_header_id|>" in tokenizer.decode(plain.prompt)
    assert tokenizer.decode(with_tools.prompt) == "2024: What is 12 + 30? TOOLS"


@pytest.mark.parametrize("name", ["openai-gpt-oss-120b", "meta-llama-Llama-3.2-3B-Instruct"])
def test_the_day_is_that_of_the_settings(name):
    chat = Chat([USER], ([GOOD],), "")
    assert any(day in decoded(name, chat)[0] for day in ("2024-07-26", "26 Jul 2024"))
    prompt = decoded(name, chat, template_date=datetime.date(2026, 11, 22))[0]
    assert any(day in prompt for day in ("2026-11-22", "22 Nov 2026"))


@pytest.mark.parametrize(
    "name, said",
    [
        ("Qwen-Qwen3-0.6B", "thinking off, unless an answer thinks"),
        ("Qwen-Qwen3-0.6B", "tools known"),
        ("google-gemma-2-2b-it", "system prompts open the first question; thinking unknown to it; tools unknown to it"),
        ("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "thinking always opened by the prompt"),
        ("microsoft-Phi-3.5-mini-instruct", "turns end with <|endoftext|> or <|end|> or <|assistant|>"),
    ],
)
def test_a_run_says_what_its_template_does(name, said):
    assert said in str(facts_of(encoder_of(name)))


DEVELOPER = {"role": "developer", "content": "Be brief."}
LOOKED = {"role": "user", "content": "What is it?", "images": ["a.png"]}
RESULT = {"role": "tool", "name": "f", "content": "rain"}


@pytest.mark.parametrize(
    "name, message, reason",
    [
        ("Qwen-Qwen2.5-7B-Instruct", LOOKED, "'images' of a message from 'user' (or leave it out with data.ignore"),
        ("microsoft-Phi-3.5-mini-instruct", RESULT, "the content of a message from 'tool'"),
    ],
)
def test_what_a_template_leaves_out_of_any_message_is_an_error_by_name(name, message, reason):
    for chat in (Chat([USER, GOOD, message], ([GOOD],), ""), Chat([USER], ([GOOD, message, GOOD],), "")):
        assert reason in str(encode(name, chat))


@pytest.mark.parametrize(
    "name", ["Qwen-Qwen2.5-7B-Instruct", "google-gemma-2-2b-it", "meta-llama-Llama-3.1-8B-Instruct"]
)
def test_a_developers_instructions_reach_every_template(name):
    prompt, _, _ = decoded(name, Chat([DEVELOPER, USER], ([GOOD],), ""))
    assert DEVELOPER["content"] in prompt


def test_a_tools_result_may_be_written_as_json():
    result = {**RESULT, "content": '{"x": "é",\n "y": [1]}'}
    assert isinstance(encode("meta-llama-Llama-3.1-8B-Instruct", Chat([USER, GOOD, result], ([GOOD],), "")), Tokens)


def test_tokens_that_are_not_learnt_are_kept_and_are_not_scored(tmp_path):
    """Through the data set, the cache of streamed rows and the micro-batch: one count, and the same batch."""
    encoder, batches = encoder_of("StepFun3.5-Flash"), []
    rows = [{"prompt": [USER], "chosen": [{**GOOD, "content": f"It is {n}."}], "rejected": [BAD]} for n in range(3)]
    file = tiny.write_jsonl(tmp_path / "rows.jsonl", rows)
    for streaming in (False, True, True):
        settings = DataSettings(train=str(file), streaming=streaming, cache_dir=str(tmp_path / "cache"))
        data = open_training(settings, "preference", encoder.tokenizer, tell=print)
        examples = data.examples(range(3))
        batches.append(collate(examples, 16, True))
        counts = [[*map(len, example.scored_indices)] for example in examples]
        if isinstance(data, Dataset):
            assert data.scored_tokens.tolist() == counts and (data.tokens < 0).any()
    one = batches[0]
    text = encoder.tokenizer.decode
    assert sum(map(sum, counts)) == int(one.mask.sum())
    assert text(one.targets[one.logp_indices[0, 0][one.mask[0, 0]]].tolist()) == "It is 0.<|im_end|>"
    for other in batches[1:]:
        for key, value in one.inputs.items():
            assert np.array_equal(value, other.inputs[key]), key


def test_ends_of_generation_config_stop_answers_in_evaluation_and_serving(tmp_path):
    """Phi-3's config.json names <|endoftext|>, its generation_config.json <|end|>: both end an answer."""
    name = "microsoft-Phi-3.5-mini-instruct"
    tokenizer = chat_models.tokenizer_of(name)
    tokenizer.save_pretrained(tmp_path)
    text, turn = (tokenizer.convert_tokens_to_ids(token) for token in ("<|endoftext|>", "<|end|>"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": text, "vocab_size": 2000}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [turn]}))
    settings = load_settings(None, [], {"model": {"path": str(tmp_path)}, "data": {"train": "none"}})
    wrapped = load_tokenizer_of(settings.model)
    assert wrapped is not None and {text, turn} <= set(wrapped.eos_token_ids)
    encoder = Encoder(wrapped, settings.data, text)
    made = encoder.encoded(Chat([USER], ([GOOD],), ""))
    assert isinstance(made, Tokens) and made.completions[0][-1] == turn and text not in made.completions[0]
