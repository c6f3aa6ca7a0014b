"""Answers-only loss: exact ids and labels, for templates that mark answers and for those that do not."""

from __future__ import annotations

import json

import pytest
from datasets import Dataset

from bigtrain.data.chat import ChatEncoder, clean_messages
from bigtrain.data.pack import build_rows
from bigtrain.data.source import load_source
from bigtrain.data.tokenise import tokenise, turn_end
from bigtrain.errors import DataError

TALK = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "four five"},
]


def _targets(tokenizer, encoded):
    """The text of each run of targets."""
    ids, labels = encoded
    assert all(label in (-100, token) for token, label in zip(ids, labels))  # never shifted
    runs, inside = [], False
    for label in labels:
        if label != -100:
            runs.append([label]) if not inside else runs[-1].append(label)
        inside = label != -100
    return [tokenizer.decode(run) for run in runs]


def _cut_marks(template):
    return template.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def test_exact_labels_of_one_answer(tokenizer):
    ids, labels = ChatEncoder(tokenizer).encode(TALK[:2], 0)
    text = "<|turn|>user\none<|turn_end|>\n<|turn|>assistant\ntwo<|turn_end|>\n"
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    answer = tokenizer("two<|turn_end|>", add_special_tokens=False)["input_ids"]
    prompt = len(tokenizer("<|turn|>user\none<|turn_end|>\n<|turn|>assistant\n", add_special_tokens=False)["input_ids"])
    after = len(ids) - prompt - len(answer)
    assert labels == [-100] * prompt + answer + [-100] * after


@pytest.mark.parametrize("marks", [True, False])
def test_all_answers_with_their_turn_end_are_targets_and_nothing_else(tokenizer, marks):
    if not marks:
        tokenizer.chat_template = _cut_marks(tokenizer.chat_template)
    chat = ChatEncoder(tokenizer)
    assert chat.marks_answers is marks
    assert _targets(tokenizer, chat.encode(TALK, 0)) == ["two<|turn_end|>", "four five<|turn_end|>"]


def test_both_ways_agree_on_every_label(tokenizer):
    marked = ChatEncoder(tokenizer).encode(TALK, 0)
    tokenizer.chat_template = _cut_marks(tokenizer.chat_template)
    assert ChatEncoder(tokenizer).encode(TALK, 0) == marked


def test_B58_turn_end_outside_of_the_marks_is_still_a_target(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|turn|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}"
        "{{ '<|turn_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
    )
    encoded = ChatEncoder(tokenizer).encode(TALK, 0)
    assert _targets(tokenizer, encoded) == ["two<|turn_end|>", "four five<|turn_end|>"]


def test_B58_a_template_without_any_turn_end_gets_the_end_token(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ':\n' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
    )
    ids, labels = ChatEncoder(tokenizer).encode(TALK[:2], 0)
    assert ids[-1] == labels[-1] == tokenizer.eos_token_id
    assert tokenizer.decode([x for x in labels if x != -100]) == "two\n<|eos|>"


def test_B58_pad_equal_to_end_keeps_the_end_in_the_loss(tokenizer):
    tokenizer.eos_token = tokenizer.pad_token = "<|turn_end|>"
    ids, labels = ChatEncoder(tokenizer).encode(TALK, 0)
    end = tokenizer.eos_token_id
    assert tokenizer.pad_token_id == end
    assert [i for i, x in enumerate(labels) if x == end] == [i for i, x in enumerate(ids) if x == end][1::2]


QWEN3_LIKE = (  # the last answer gets an empty thought, earlier ones lose theirs
    "{% for m in messages %}{{ '<|turn|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'].split('</think>')[-1] + '<|turn_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)


def test_template_that_looks_ahead_is_read_by_content(plain_chat_tokenizer):
    plain_chat_tokenizer.chat_template = QWEN3_LIKE
    encoded = ChatEncoder(plain_chat_tokenizer).encode(TALK, 0)
    targets = _targets(plain_chat_tokenizer, encoded)
    assert targets[0] == "two<|turn_end|>"
    assert targets[1].endswith("four five<|turn_end|>") and len(targets) == 2


def test_template_that_changes_answers_is_refused_by_sample(plain_chat_tokenizer):
    plain_chat_tokenizer.chat_template = QWEN3_LIKE
    talk = [TALK[0], {"role": "assistant", "content": "thought</think>two"}, *TALK[2:]]
    with pytest.raises(DataError, match=r"sample 5: message 1: the chat template renders earlier messages differently"):
        ChatEncoder(plain_chat_tokenizer).encode(talk, 5)


def test_conversation_that_begins_with_an_answer(plain_chat_tokenizer, tokenizer):
    with pytest.raises(DataError, match="sample 3: the conversation begins with an answer"):
        ChatEncoder(plain_chat_tokenizer).encode(TALK[1:2], 3)


def test_marks_around_nothing_are_refused(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% generation %}{% endgeneration %}"
    with pytest.raises(DataError, match="sample 0: the chat template has"):
        ChatEncoder(tokenizer).encode(TALK, 0)


def test_template_errors_name_the_sample_and_its_roles(plain_chat_tokenizer):
    plain_chat_tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"sample 9: .*\['user', 'assistant'.*roles must alternate"):
        ChatEncoder(plain_chat_tokenizer).encode(TALK, 9)


def test_no_template_is_refused_with_the_remedy(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        ChatEncoder(tokenizer)


@pytest.mark.parametrize(
    "raw", [None, [], "hello", [{"content": "x"}], [{"role": "user"}], [{"role": "user", "content": None}]]
)
def test_bad_messages_name_the_sample(raw):
    with pytest.raises(DataError, match="sample 4"):
        clean_messages(raw, 4)


def test_none_fields_that_arrow_adds_are_dropped():
    raw = [{"role": "user", "content": "x", "tool_calls": None}]
    assert clean_messages(raw, 0) == [{"role": "user", "content": "x"}]


def test_messages_column_through_datasets(tokenizer):
    source = Dataset.from_list([{"messages": TALK[:2]}, {"messages": TALK}])
    out = tokenise(source, tokenizer)
    chat = ChatEncoder(tokenizer)
    for row, messages in zip(out, (TALK[:2], TALK)):
        assert (row["input_ids"], row["labels"]) == chat.encode(messages, 0)


def test_prompt_and_completion_text(tokenizer):
    source = Dataset.from_list([{"prompt": "one two ", "completion": "three four"}])
    row = tokenise(source, tokenizer)[0]
    kept = [x for x in row["labels"] if x != -100]
    assert tokenizer.decode(row["input_ids"]) == "one two three four<|eos|>"
    assert tokenizer.decode(kept).strip() == "three four<|eos|>"
    assert row["labels"][0] == -100 and row["labels"][-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("marks", [True, False])
def test_prompt_and_completion_messages_train_on_the_completion_only(tokenizer, marks):
    if not marks:
        tokenizer.chat_template = _cut_marks(tokenizer.chat_template)
    source = Dataset.from_list([{"prompt": TALK[:3], "completion": TALK[3:]}])
    row = tokenise(source, tokenizer)[0]
    assert _targets(tokenizer, (row["input_ids"], row["labels"])) == ["four five<|turn_end|>"]


@pytest.mark.parametrize("marks", [True, False])
def test_what_a_template_for_text_alone_cannot_say_is_refused(tokenizer, marks):
    """Content in parts was learned as Python prints a list, and a tool call as an empty answer."""
    template = (
        "{% for m in messages %}<|turn|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|turn_end|>"
        "{% endgeneration %}{% else %}{{ m.content }}<|turn_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
    )
    tokenizer.chat_template = template if marks else _cut_marks(template)
    chat = ChatEncoder(tokenizer)
    parts = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in TALK[:2]]
    with pytest.raises(DataError, match=r"sample 7: the chat template prints the content .*'text': 'one'"):
        chat.encode(parts, 7)
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
    called = [TALK[0], {"role": "assistant", "content": "", "tool_calls": [call]}, *TALK[2:]]
    with pytest.raises(DataError, match="sample 8: the chat template leaves out tool calls"):
        chat.encode(called, 8)


def test_a_template_that_has_tool_calls_and_parts_takes_them(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}<|turn|>{{ m.role }}\n{% generation %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}"
        "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}{% endgeneration %}<|turn_end|>{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "weather", "arguments": {}}}
    talk = [
        {"role": "user", "content": [{"type": "text", "text": "one"}]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    ids, _ = ChatEncoder(tokenizer).encode(talk, 0)
    assert tokenizer.decode(ids) == "<|turn|>user\none<|turn_end|><|turn|>assistant\nweather<|turn_end|>"


@pytest.mark.parametrize("content", [4, 1.5, True, {"a": 1}])
def test_content_that_is_no_text_is_named_with_its_value(tokenizer, content):
    with pytest.raises(DataError, match=rf"sample 7: the content of message 1 \(assistant\) is {type(content).__name__}"):
        clean_messages([{"role": "user", "content": "q"}, {"role": "assistant", "content": content}], 7)


@pytest.mark.parametrize("role", ["Assistant", "ASSISTANT ", "gpt", "model"])
def test_answers_under_another_name_are_refused_not_passed_over(role):
    with pytest.raises(DataError, match=f"sample 3: message 1 has the role '{role}': answers"):
        clean_messages([{"role": "user", "content": "q"}, {"role": role, "content": "a"}], 3)
    assert clean_messages([{"role": "human", "content": "q"}], 3) == [{"role": "human", "content": "q"}]


def test_keys_that_a_typed_table_adds_to_tool_calls_are_not_learned(tokenizer, tmp_path):
    """Arrow gives each tool call the arguments of all. What is null in JSON stays."""
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|turn|>' + m['role'] }}{% generation %}{{ m.tool_calls | tojson if m.tool_calls else m.content }}"
        "{% endgeneration %}{{ '<|turn_end|>' }}{% endfor %}{{ tools | tojson if tools }}"
    )

    def row(arguments):
        calls = [{"name": "f", "arguments": arguments}]
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": calls}]
        return {"messages": messages, "tools": [{"name": "f", "properties": {name: {"type": "string"} for name in arguments}}]}

    rows = [row({"city": "x"}), row({"unit": "y", "n": 3})]
    Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    tables, lines = (tokenise(load_source(tmp_path / name), tokenizer)[:] for name in ("a.parquet", "a.jsonl"))
    assert tables == lines
    assert '"arguments": {"city": "x"}}' in tokenizer.decode(tables["input_ids"][0])
    (tmp_path / "a.jsonl").write_text(json.dumps(row({"city": None})))
    assert '"arguments": {"city": null}}' in tokenizer.decode(
        tokenise(load_source(tmp_path / "a.jsonl"), tokenizer)[0]["input_ids"]
    )


@pytest.mark.parametrize("marks", [True, False])
def test_roles_and_tools_that_the_template_passes_over_are_refused(tokenizer, marks):
    known = (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|turn|>' + m['content'] }}{% elif m['role'] == 'assistant' %}"
        "{{ '<|turn|>' }}{% generation %}{{ m['content'] + '<|turn_end|>' }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    tokenizer.chat_template = known if marks else _cut_marks(known)
    chat = ChatEncoder(tokenizer)
    chat.encode(TALK, 0)
    with pytest.raises(DataError, match="sample 4: the chat template leaves out message 0, whose role is 'system'"):
        chat.encode([{"role": "system", "content": "be brief"}, *TALK], 4)
    chat.encode([{"role": "system", "content": " "}, *TALK], 5)  # nothing is lost
    with pytest.raises(DataError, match="sample 6: the chat template leaves out the tools"):
        chat.encode(TALK, 6, tools=[{"name": "f"}])
    tokenizer.chat_template = "{{ tools | tojson if tools }}" + tokenizer.chat_template
    ChatEncoder(tokenizer).encode(TALK, 7, tools=[{"name": "f"}])


def test_what_ends_an_answer_is_known_of_conversations_alone(tokenizer):
    end, talk = tokenizer.convert_tokens_to_ids("<|turn_end|>"), [TALK[:2]] * 2

    def told(**columns):
        return build_rows(Dataset.from_dict(columns), tokenizer, 32).turn_end

    assert told(messages=talk) == told(prompt=[t[:1] for t in talk], completion=[t[1:] for t in talk]) == end
    assert told(prompt=["one"] * 2, completion=["two"] * 2) is told(text=["one two"] * 2) is None
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    assert ChatEncoder(tokenizer).turn_end == tokenizer.eos_token_id
    assert turn_end(Dataset.from_dict({"messages": talk}).select([]), tokenizer, "text") is None  # was an IndexError


OPENING = (  # the user's turn is opened as soon as an answer is over
    "<|user|>{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% else %}{{ '<|turn|>' }}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}{{ '<|user|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>' }}{% endif %}"
)


@pytest.mark.parametrize("marks", [True, False])
def test_what_opens_the_users_turn_is_no_end_of_an_answer(tokenizer, marks):
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    tokenizer.chat_template = OPENING if marks else _cut_marks(OPENING)
    chat = ChatEncoder(tokenizer)
    ids, labels = chat.encode(TALK, 0)
    assert chat.turn_end == ids[-1] == labels[-1] == tokenizer.eos_token_id
    assert _targets(tokenizer, (ids, labels)) == ["two", "four five<|eos|>"]
    assert tokenizer.decode(ids) == "<|user|>one<|turn|>two<|user|>\nthree<|turn|>four five<|eos|>"


@pytest.mark.parametrize(
    "template",
    [
        # the template itself says that it is learned
        OPENING.replace("{% endgeneration %}{{ '<|user|>\n' }}", "{{ '<|user|>' }}{% endgeneration %}"),
        # it stands between any two turns: nothing else ends one
        "<|user|>{% for m in messages %}{{ m['content'] + '<|user|>' }}{% endfor %}",
    ],
)
def test_a_special_token_that_the_template_means_as_an_end_is_one(tokenizer, template):
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    tokenizer.chat_template = template
    chat = ChatEncoder(tokenizer)
    assert chat.turn_end == tokenizer.convert_tokens_to_ids("<|user|>")
    assert _targets(tokenizer, chat.encode(TALK, 0)) == ["two<|user|>", "four five<|user|>"]
