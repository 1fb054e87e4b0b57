"""Streamed text: the parts add up to the whole text, and a long text is decoded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_plugin.tools.generate import Streamed

WORDS = (" a", " the", "ing", "é", " ", "\n", "😀", "x", ",", "日本")


def decode_bytes(ids: Sequence[int]) -> str:
    return bytes(ids).decode(errors="replace")


def decode_words(ids: Sequence[int]) -> str:
    """As SentencePiece does: a space in front belongs to the first word, and is not text."""
    return "".join(WORDS[i] for i in ids).removeprefix(" ")


def shown(decode: Callable[[Sequence[int]], str], prompt: list[int], new: list[int]) -> list[str]:
    """The writes: the prompt, one per token, the end."""
    parts: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.stdout.write", parts.append)
        stream = Streamed([prompt], decode, quiet=False)
        for token in new:
            stream.add([token])
        stream.end()
    return parts


TEXT = st.characters(codec="utf-8", exclude_characters="\ufffd")


@settings(max_examples=30)
@given(st.text(TEXT, min_size=1), st.text(TEXT))
def test_characters_of_several_bytes(prompt: str, new: str) -> None:
    first, then = list(prompt.encode()), list(new.encode())
    parts = shown(decode_bytes, first, then)
    assert "".join(parts) == decode_bytes(first + then) + "\n"
    assert sum(map(bool, parts[1:-1])) == len(decode_bytes(then)) and not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize(("decode", "ids"), [(decode_bytes, 256), (decode_words, len(WORDS))])
@given(st.data())
def test_bytes_that_are_no_characters_and_words_with_their_space_in_front(
    decode: Callable[[Sequence[int]], str], ids: int, data: st.DataObject
) -> None:
    texts = st.lists(st.integers(0, ids - 1))
    prompt, new = data.draw(texts.filter(len)), data.draw(texts)
    if not decode(prompt).endswith("\ufffd"):
        assert "".join(shown(decode, prompt, new)) == f"{decode([*prompt, *new])}\n"


def test_a_long_text_is_decoded_once() -> None:
    lengths: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return decode_bytes(ids)

    shown(decode, [65] * 100_000, [66] * 200)
    assert lengths[0] == 100_000 and max(lengths[1:]) <= 2 * 8 + 2
