"""The table of languages equals that of `transformers`."""

import pytest
from ed_data.languages import CODES, LANGUAGES, language_code
from transformers.models.whisper import tokenization_whisper


def test_languages_and_their_names_equal_those_of_transformers() -> None:
    assert tokenization_whisper.LANGUAGES == LANGUAGES
    assert tokenization_whisper.TO_LANGUAGE_CODE == CODES


def test_a_code_and_a_name_denote_the_same_language() -> None:
    assert language_code("DE") == language_code("German") == "de"
    with pytest.raises(ValueError, match=r"'germn' is not a language of Whisper.*'german'"):
        language_code("germn")
