"""Reading a model directory, encoding, decoding, chat templates."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

import common.demo_model
from common.errors import JSON_DEPTH, ConfigError, InvalidRequestError
from common.tokenization import ChatTemplate, Tokenizer, TooManyTokensError
from tests.unit.common.tokenization.tiny_tokenizers import KINDS, byte_level, sentencepiece


@pytest.fixture
def model_dir(tmp_path):
    byte_level()._backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_missing_tokenizer_is_one_clear_line(tmp_path):
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json") as caught:
        Tokenizer.from_directory(tmp_path)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("chat_template.jinja", "{% if %}"),
    ],
)
def test_broken_files_name_what_is_wrong(model_dir, name, content):
    (model_dir / name).write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer|chat template"):
        Tokenizer.from_directory(model_dir)


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(kind):
    tokenizer = KINDS[kind]()
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"


def test_encoded_ids_are_shared_between_prompts():
    """A prompt of 10,000 tokens then takes 80 KB, not 400 KB."""
    tokenizer = Tokenizer.from_directory(Path(common.demo_model.__file__).parent / "weights")
    ids, again = tokenizer.encode("Once upon a time"), tokenizer.encode("Once upon a time")
    assert ids == tokenizer._backend.encode("Once upon a time").ids
    assert max(ids) > 256, "Python shares smaller ones anyway"
    assert all(one is other for one, other in zip(ids, again, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_visible_is_what_decode_looks_at(kind):
    tokenizer = KINDS[kind]()
    for token_id in range(len(tokenizer._ids) + 10):
        known = tokenizer._backend.id_to_token(token_id) is not None
        assert tokenizer.is_visible(token_id) == (known and token_id not in tokenizer.special_ids)
    assert not tokenizer.is_visible(2**32 - 1)


@pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece()], ids=["byte_level", "sentencepiece"])
def test_token_bytes_joined_are_the_text(tokenizer):
    ids = tokenizer.encode("hello wör 日😀")
    assert b"".join(map(tokenizer.token_bytes, ids)).decode().lstrip() == "hello wör 日😀"
    assert tokenizer.token_text(tokenizer.encode("</s>")[-1]) == "</s>"


def test_chat_template_from_either_file(model_dir):
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    settings = {"chat_template": template, "bos_token": {"content": "<s>"}}
    (model_dir / "tokenizer_config.json").write_text(json.dumps(settings))
    messages = [{"role": "user", "content": "hi"}]
    assert Tokenizer.from_directory(model_dir).render_chat(messages) == "<s>[user]hi"
    (model_dir / "chat_template.jinja").write_text("{{ messages | tojson }}")
    assert Tokenizer.from_directory(model_dir).render_chat(messages) == json.dumps(messages)


def test_template_offers_what_the_hub_expects():
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y') | length }}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    template = ChatTemplate(source, {})
    assert template.render([{"content": "<a&b>"}, {"content": "c"}]) == "<a&b>4>"
    assert template.render([], add_generation_prompt=False) == "4"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages.__class__.__mro__ }}",
    ],
)
def test_a_refusing_template_names_the_messages(source):
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}])
    assert caught.value.param == "messages"


def test_what_is_too_deep_for_a_template_is_refused():
    deep = []
    for _ in range(10 * JSON_DEPTH):
        deep = [deep]
    with pytest.raises(InvalidRequestError, match=str(JSON_DEPTH)):
        ChatTemplate("{{ tools | tojson }}", {}).render([], variables={"tools": deep})


def test_no_template_is_an_error_not_a_guess():
    with pytest.raises(InvalidRequestError, match="no chat template"):
        byte_level().render_chat([{"role": "user", "content": "hi"}])


def test_torch_is_not_imported():
    code = "import common.tokenization, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_of_as_many_tokens_as_it_may_have_is_encoded(kind):
    tokenizer = KINDS[kind]()

    @settings(deadline=None)
    @given(text=st.text(max_size=60), times=st.sampled_from([1, 1000]))
    @example(text="e\u0301" * 20, times=1000)
    @example(text="0" * 50, times=1000)
    def every_text_fits_its_own_length(text, times):
        ids = tokenizer.encode(text * times)
        assert tokenizer.encode(text * times, max_tokens=len(ids)) == ids
        if ids:
            with pytest.raises(TooManyTokensError):
                tokenizer.encode(text * times, max_tokens=len(ids) - 1)

    every_text_fits_its_own_length()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unit", ["e", " ", "e\u0301", "\u0301", "😀", "\0", "hello there. "])
def test_what_has_too_many_tokens_is_refused_half_read(kind, unit, monkeypatch):
    tokenizer, num_read = KINDS[kind](), 0

    class Backend:
        def encode_batch_fast(self, texts, **options):
            nonlocal num_read
            num_read += sum(map(len, texts))
            return backend.encode_batch_fast(texts, **options)

    backend = tokenizer._backend
    text = unit * (1_000_000 // len(unit))
    if len(tokenizer.encode(text[:1000])) < 100:
        return  # unknown characters have one token together
    monkeypatch.setattr(tokenizer, "_backend", Backend())
    with pytest.raises(TooManyTokensError):
        tokenizer.encode(text, max_tokens=10_000)
    assert num_read < 250_000
    num_read = 0
    end = tokenizer.end_of(text, 10_000)
    assert num_read < 250_000
    assert len(backend.encode(end).ids) > 10_000
    assert len(end) < 250_000
    assert text.endswith(end)


@pytest.mark.parametrize(
    ("body", "takes_parts"),
    [
        ("{{ m.content }}", False),
        ("{{ m['content'] | trim }}", False),
        ("{% for line in m.content.split('x') %}{{ line }}{% endfor %}", False),
        ("{% for part in m.content %}{{ part.text }}{% endfor %}", True),
        ("{% for part in m['content'] | list %}{{ part.text }}{% endfor %}", True),
        ("{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% endfor %}{% endif %}", True),
        ("{% set c = m.content %}{% set d = c %}{% for part in d %}{{ part.text }}{% endfor %}", True),
        (
            "{% macro show(content) %}{% for p in content %}{{ p }}{% endfor %}{% endmacro %}{{ show(m.content) }}",
            True,
        ),
    ],
)
def test_what_a_template_takes_as_content(body, takes_parts):
    template = ChatTemplate("{% for m in messages %}" + body + "{% endfor %}", {})
    assert template.takes_parts == takes_parts


def test_texts_are_joined_by_line_feeds_or_given_as_parts():
    content = ["one", {"type": "text", "text": "two"}]
    messages = [{"role": "user", "content": content}, {"role": "user", "content": "three"}]
    one_text = ChatTemplate("{% for m in messages %}<{{ m.content }}>{% endfor %}", {})
    assert one_text.render(messages) == "<one\ntwo><three>"
    parts = ChatTemplate("{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}", {})
    assert parts.render(messages) == "<one><two><three>"


@pytest.mark.parametrize("shown", ["{{ m.content }}", "{{ m.content | trim }}"])
@pytest.mark.parametrize("text", ["It is", "It is ", "It is  \n"])
def test_a_final_message_is_continued_as_by_transformers(shown, text):
    source = "{% for m in messages %}<{{ m.role }}>" + shown + "</>\n{% endfor %}"
    messages = [{"role": "user", "content": "It is"}, {"role": "assistant", "content": text}]
    ours = ChatTemplate(source, {}).render(messages, add_generation_prompt=False, continue_final_message=True)
    (theirs,), _ = render_jinja_template([messages], chat_template=source, continue_final_message=True)
    assert ours == theirs
    with pytest.raises(InvalidRequestError, match="leaves the last message out"):
        ChatTemplate("{{ messages[0].content }}", {}).render(messages, continue_final_message=True)
