"""Detokenization, stop strings, the policy for long prompts, and intake. No device."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from ed_esurge.config import EngineConfig
from ed_esurge.engine.intake import Intake, derive_seed, fit, get_seeds, salt, truncate
from ed_esurge.model import eos_token_ids
from ed_esurge.sampling import SamplingParams
from ed_esurge.template import ChatTemplate
from ed_esurge.testing import byte_tokenizer
from ed_esurge.thinking import ThoughtTexts
from ed_esurge.tokenizer import Detokenizer, StopStringSearch, bad_word_ids, tokenize_text
from ed_esurge.tokenizer_endpoints import connect_tokenizers
from ed_infra.errors import ConfigError
from ed_infra.logging import forget_said
from ed_models.families.llama import LlamaConfig
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

TOKENIZER = byte_tokenizer()


class SlowTokenizer:
    """A tokenizer without a Rust backend."""

    def decode(self, ids, **options):
        return TOKENIZER.decode(ids, **options)


def pieces(detokenizer: Detokenizer, tokens: list[int]) -> list[str]:
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=20), st.text(max_size=20), st.integers(0, 3), st.booleans())
@example("Grüße", "世界 🌍!", 2, False)
@example("ab\N{REPLACEMENT CHARACTER}", "\N{REPLACEMENT CHARACTER}x", 0, True)
def test_joined_pieces_equal_the_decoded_text(before, text, cut, slow):
    tokenizer = SlowTokenizer() if slow else TOKENIZER
    prompt = TOKENIZER(before)["input_ids"]
    tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    tokens = tokens[: max(len(tokens) - cut, 0)]  # may end inside a character
    joined = "".join(pieces(Detokenizer(tokenizer, prompt), tokens))
    assert joined == TOKENIZER.decode(tokens, skip_special_tokens=True)


def test_detokenizer_emits_only_complete_characters():
    tokens = TOKENIZER("a🌍b", add_special_tokens=False)["input_ids"]
    assert pieces(Detokenizer(TOKENIZER, []), tokens) == ["a", "", "", "", "🌍", "b", ""]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("text", [None, "\N{REPLACEMENT CHARACTER}"])
def test_tokens_without_text_are_read_in_linear_time(slow, text):
    """Skipped special tokens, and bytes that form no character; a client can force both."""
    count = 100_000
    tokens = [TOKENIZER.eos_token_id if text is None else TOKENIZER("é")["input_ids"][-1]] * count
    after = TOKENIZER("b🌍c", add_special_tokens=False)["input_ids"]
    tokens = [*TOKENIZER("a", add_special_tokens=False)["input_ids"], *tokens, *after * 3000]
    tokenizer = SlowTokenizer() if slow else TOKENIZER
    parts = pieces(Detokenizer(tokenizer, []), tokens)
    expected = "a" + (text or "") * count + "b🌍c" * 3000
    assert "".join(parts) == expected == TOKENIZER.decode(tokens, skip_special_tokens=True)
    # The delay is at most an eighth of the tokens without text.
    assert parts[-1:-6:-1] == ["", "c", "🌍", "", ""]


def test_special_tokens_are_optional_in_the_text():
    tokens = [*TOKENIZER("hi", add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]
    assert "".join(pieces(Detokenizer(TOKENIZER, []), tokens)) == "hi"
    shown = Detokenizer(TOKENIZER, [], skip_special_tokens=False)
    assert "".join(pieces(shown, tokens)) == "hi</s>"


@settings(max_examples=200, deadline=None)
@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
    st.booleans(),
)
def test_stop_strings_are_found_in_any_split_of_the_text(text, stops, sizes, include):
    matcher = StopStringSearch(stops, include=include)
    out, at = "", 0
    while at < len(text):
        size = sizes[at % len(sizes)]
        out += matcher.push(text[at : at + size])
        if matcher.found:
            break
        # Delivered text is never part of a later stop string.
        assert text.startswith(out)
        at += size
    out += matcher.flush()
    hits = [(text.find(stop), stop) for stop in stops if stop in text]
    if not hits:
        assert out == text
        return
    # The match that ends first is found first. Pieces of several characters may delay a match.
    assert matcher.found in stops
    where = text.find(matcher.found)
    assert out == text[: where + (len(matcher.found) if include else 0)]


def test_only_a_possible_beginning_of_a_stop_string_is_withheld():
    matcher = StopStringSearch(["</end>"])
    assert matcher.push("hello <") == "hello "
    assert matcher.push("/en") == ""
    assert matcher.push("ough") == "</enough"
    assert matcher.push("x</end>y") == "x"
    assert matcher.found == "</end>"
    assert matcher.push("more") == ""


@pytest.mark.timeout(60)
def test_repeated_text_is_searched_for_stop_strings_in_linear_time():
    stops = [f"{'a' * (2000 + 30 * number)}{number:02}" for number in range(63)]
    matcher = StopStringSearch([*stops, "a" * 4000 + "b"])
    pushed = [matcher.push("a") for _ in range(6000)]
    assert sum(map(len, pushed)) == 2000
    assert "".join([*pushed, matcher.push("13c"), matcher.flush()]) == "a" * (6000 - 2390)
    assert matcher.found == stops[13]


THOUGHTS = ThoughtTexts(opens=("<think>",), closes=("</think>",))


@pytest.mark.parametrize(
    ("inside", "text", "expected", "match"),
    [
        (True, "a Step b</think>c Step d", "a Step b</think>c ", "Step"),
        (True, "a Step b", "a Step b", None),
        (False, "<think>Step</think>a Step", "<think>Step</think>a ", "Step"),
        (False, "a Step <think>", "a ", "Step"),
        (False, "a<think>Step</think>b<think>Step</think>cStep", None, "Step"),
        (True, "a END b</think>", "a ", "END"),
    ],
)
def test_stop_strings_do_not_apply_within_thoughts(inside, text, expected, match):
    thoughts = THOUGHTS.replace(inside=inside)
    expected = text.removesuffix("Step") if expected is None else expected
    for size in range(1, len(text) + 1):
        matcher = StopStringSearch(["Step"], thoughts=thoughts, everywhere=["END"])
        pieces = [matcher.push(text[at : at + size]) for at in range(0, len(text), size)]
        assert "".join([*pieces, matcher.flush()]) == expected, size
        assert matcher.found == match
    early = StopStringSearch(["Step"], thoughts=THOUGHTS)
    assert early.push("<think>Step</think> Step <think>", check=False) + early.flush() == (
        "<think>Step</think> Step <think>"
    )
    assert early.push("Step</think>Step") == "Step</think>"


CONFIG = EngineConfig(max_model_len=10, auto_truncate_prompt=True)


@pytest.mark.parametrize(
    ("options", "length", "asked", "expected"),
    [
        ({}, 4, 3, (4, 3)),
        ({}, 4, None, (4, 6)),
        ({}, 8, 5, (8, 2)),
        ({}, 10, 5, (9, 1)),
        ({"reserve_tokens": 4}, 10, 9, (6, 4)),
        ({"prefer_preserve_prompt": False}, 8, 5, (5, 5)),
        ({"prefer_preserve_prompt": False}, 3, 50, (1, 9)),
        ({}, 10, 0, (10, 0)),
        ({"reserve_tokens": 4}, 12, 0, (10, 0)),
    ],
)
def test_context_options_truncate_prompts_and_cap_max_tokens(options, length, asked, expected):
    prompt, tokens = fit(list(range(length)), asked, CONFIG.replace(**options), 10)
    assert (len(prompt), tokens) == expected


@pytest.mark.parametrize(
    ("options", "length", "asked"),
    [
        ({"auto_truncate_prompt": False}, 10, 1),
        ({"auto_cap_new_tokens": False}, 8, 3),
        ({"strict_context": True}, 8, 3),
        ({"strict_context": True}, 12, 1),
        ({}, 0, 1),
    ],
)
def test_request_beyond_a_strict_context_raises_error(options, length, asked):
    with pytest.raises(ConfigError):
        fit([1] * length, asked, CONFIG.replace(**options), 10)


def test_prompt_beyond_the_context_raises_error_by_default():
    config = EngineConfig(max_model_len=10)
    with pytest.raises(ConfigError, match="set auto_truncate_prompt"):
        fit([1] * 10, None, config, 10)
    # The prompt is not truncated, so fewer tokens than requested can be generated.
    assert fit([1] * 8, 5, config, 10) == ([1] * 8, 2)
    assert fit([1] * 8, 5, config.replace(prefer_preserve_prompt=False), 10) == ([1] * 8, 2)


def test_truncate_removes_tokens_on_the_selected_side():
    assert truncate(list(range(6)), 3, "left") == [3, 4, 5]
    assert truncate(list(range(6)), 3, "right") == [0, 1, 2]
    assert truncate(list(range(6)), 3, "middle") == [0, 1, 5]
    assert truncate(list(range(6)), 1, "middle") == [0]


def intake(**options) -> Intake:
    config = EngineConfig(**options)
    return Intake(
        config,
        TOKENIZER,
        eos_token_ids=frozenset([257]),
        max_model_len=64,
        vocab_size=258,
        max_logprobs=20,
    )


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([300], {}, "outside the vocabulary of 258"),
        ([], {}, "no tokens"),
        ([1], {"logprobs": 21}, "max_logprobs=20"),
        ([1], {"prompt_logprobs": 50}, "max_logprobs=20"),
        ([1], {"logit_bias": {258: 1.0}}, "outside the vocabulary"),
        ([1], {"allowed_token_ids": (257,), "min_tokens": 2}, "which min_tokens forbids"),
        ([1] * 60, {"max_tokens": 30, "min_tokens": 20}, "min_tokens=20 exceeds the 4"),
    ],
)
def test_intake_rejects_impossible_requests(prompt, params, message):
    with pytest.raises(ConfigError, match=message):
        intake().prepare("a", prompt, SamplingParams(**params))


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -1},
        {"top_p": 0},
        {"top_k": -2},
        {"n": 0},
        {"max_tokens": 0},
        {"stop": [""]},
        {"stop": "x", "detokenize": False},
        {"allowed_token_ids": []},
        {"min_tokens": 30},
        {"temprature": 1},
        # Numbers that exceed the types of the device or the memory of the host.
        {"top_k": 2**31},
        {"temperature": float("inf")},
        {"temperature": float("nan")},
        {"repetition_penalty": float("inf")},
        {"repetition_penalty": 1e-30},
        {"presence_penalty": float("nan")},
        {"logit_bias": {1: float("inf")}},
        {"logit_bias": {1: float("nan")}},
        {"logit_bias": {2**40: 1.0}},
        {"stop_token_ids": (2**31,)},
        {"min_p": float("nan")},
        {"n": 10**9},
        {"max_tokens": 2**31},
        {"logprobs": 2**31},
        {"seed": 2**63},
        {"seed": -(2**63) - 1},
    ],
)
def test_sampling_params_reject_impossible_options(params):
    with pytest.raises(ValidationError):
        SamplingParams(**params)


@pytest.mark.parametrize(
    "options",
    [
        {"seed": -1},
        {"max_num_seqs": 10**9},
        {"page_size": 10**6},
        {"max_model_len": 2**31},
        {"num_pages": 2**20, "page_size": 2**11},
        {"cpu_cache_gib": float("inf")},
        {"hbm_utilization": float("nan")},
        {"extra_eos_token_ids": (-1,)},
        {"max_logprobs": 2**40},
    ],
)
def test_impossible_engine_options_raise_error(options):
    with pytest.raises(ValidationError):
        EngineConfig(**options)


def test_token_ids_outside_the_vocabulary_end_and_ban_nothing():
    """The tokenizer may have more tokens than the model. No step can sample these tokens."""
    model = SimpleNamespace(
        config=LlamaConfig(vocab_size=100, eos_token_id=[2, 100]),
        generation_json='{"eos_token_id": 99}',
    )
    assert TOKENIZER.eos_token_id >= 100
    assert eos_token_ids(model, TOKENIZER, (7,)) == {2, 7, 99}
    words = "no", "—"
    known = max(max(ids) for ids in bad_word_ids(TOKENIZER, words[:1])) + 1
    small = Intake(
        EngineConfig(),
        TOKENIZER,
        eos_token_ids=frozenset(),
        max_model_len=64,
        vocab_size=known,
        max_logprobs=0,
    )
    add = small.prepare("a", [1], SamplingParams(bad_words=words))
    assert add.bad_token_ids == bad_word_ids(TOKENIZER, words[:1])


def test_salt_depends_on_adapter_prompt_class_and_cache_salt():
    plain = intake().prepare("a", [1], SamplingParams())
    assert plain.salt == b""
    salts = [
        intake().prepare("a", [1], SamplingParams(), cache_salt=text).salt
        for text in ("", "x", "x")
    ]
    assert [len(one) for one in salts] == [16] * 3
    assert salts[0] != salts[1] == salts[2]
    assert (
        len({salt(*case) for case in [(0, 0, None), (1, 0, None), (0, 1, None), (1, 1, "")]}) == 4
    )


def test_request_seeds_depend_on_seed_and_index():
    def seeds(arrival: int, **params) -> list[int]:
        wanted = SamplingParams(**params)
        return get_seeds(wanted, derive_seed(wanted, 0, arrival))

    assert seeds(0, seed=5, n=3) == seeds(7, seed=5, n=3)
    assert len(set(seeds(0, seed=5, n=3))) == 3
    assert seeds(0, seed=5)[0] == seeds(0, seed=5, n=3)[0]
    assert seeds(0) == seeds(0) != seeds(1)
    assert seeds(3, seed=derive_seed(SamplingParams(), 0, 1), n=2) == seeds(1, n=2)


def test_bad_words_are_encoded_with_and_without_a_space():
    plain = tuple(TOKENIZER("no", add_special_tokens=False)["input_ids"])
    spaced = tuple(TOKENIZER(" no", add_special_tokens=False)["input_ids"])
    assert bad_word_ids(TOKENIZER, [" no"]) == (plain, spaced)


def test_bad_words_of_white_space_are_encoded_unchanged():
    def ids(text):
        return tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"])

    assert bad_word_ids(TOKENIZER, ["\n"]) == (ids("\n"), ids(" \n"))
    assert bad_word_ids(TOKENIZER, [" "]) == (ids(" "),)


class EndpointHandler(BaseHTTPRequestHandler):
    """The routes of a tokenizer in another process, as in vLLM."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(self.path)
        if self.server.is_broken:
            self.send_error(500)
            return
        if self.path == "/tokenize":
            ids = TOKENIZER(body["prompt"], add_special_tokens=body["add_special_tokens"])
            answer = {"tokens": [i + self.server.shift for i in ids["input_ids"]]}
        else:
            answer = {"prompt": TOKENIZER.decode([i + self.server.shift for i in body["tokens"]])}
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


@pytest.fixture
def endpoint():
    with ThreadingHTTPServer(("127.0.0.1", 0), EndpointHandler) as server:
        server.asked, server.shift, server.is_broken = [], 0, False
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        server.url = f"http://127.0.0.1:{server.server_port}/"
        yield server
        server.shutdown()
        thread.join()


def test_endpoints_encode_prompts_and_decode_outputs(endpoint, caplog):
    forget_said()
    address = EngineConfig(tokenizer_endpoint=endpoint.url).tokenizer_endpoint
    assert address == endpoint.url.rstrip("/")
    encoder, decoder = connect_tokenizers(TOKENIZER, address, address)
    endpoint.asked.clear()
    text = "Grüße 🌍 a b"
    for special in (True, False):
        expected = TOKENIZER(text, add_special_tokens=special)["input_ids"]
        assert tokenize_text(encoder, text, add_special_tokens=special) == expected
    assert endpoint.asked == ["/tokenize"] * 2
    tokens = [*TOKENIZER(text, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]
    for skip in (True, False):
        ours = pieces(Detokenizer(decoder, [5], skip_special_tokens=skip), tokens)
        assert "".join(ours) == TOKENIZER.decode(tokens, skip_special_tokens=skip)
    assert "/detokenize" in endpoint.asked
    assert encoder.eos_token_id == TOKENIZER.eos_token_id
    # A tokenizer that fails later is replaced by that of the engine.
    endpoint.is_broken = True
    with caplog.at_level("WARNING"):
        assert tokenize_text(encoder, text) == TOKENIZER(text)["input_ids"]
        assert decoder.decode(tokens) == TOKENIZER.decode(tokens)
    assert "the tokenizer of the engine replaces it" in caplog.text
    plain = connect_tokenizers(TOKENIZER, None, None)
    assert plain == (TOKENIZER, TOKENIZER)


def test_endpoint_with_another_tokenizer_or_none_is_refused(endpoint):
    address = endpoint.url.rstrip("/")
    endpoint.shift = 1
    for name, addresses in (
        ("tokenizer_endpoint", (address, None)),
        ("detokenizer_endpoint", (None, address)),
    ):
        with pytest.raises(ConfigError, match=f"^{name} .* has another tokenizer"):
            connect_tokenizers(TOKENIZER, *addresses)
    endpoint.is_broken = True
    with pytest.raises(ConfigError, match="does not answer as a tokenizer"):
        connect_tokenizers(TOKENIZER, address, None)
    with pytest.raises(ConfigError, match="require the tokenizer of the model"):
        connect_tokenizers(None, address, None)
    for wrong in ("tcp://127.0.0.1:5", "127.0.0.1:5", "http://", "http://a/?x=1"):
        with pytest.raises(ValidationError, match="no address of a tokenizer"):
            EngineConfig(detokenizer_endpoint=wrong)


@pytest.mark.nightly
def test_engine_with_endpoints_answers_as_without(endpoint):
    from ed_esurge.engine.surge import eSurge
    from ed_infra.testing import tiny_llama
    from ed_models.families.llama import LlamaForCausalLM

    fields = tiny_llama(vocab_size=len(TOKENIZER), num_hidden_layers=1)
    del fields["model_type"]
    model = LlamaForCausalLM.create(LlamaConfig(**fields, sharding_axis_dims=(1, 1, 1, 1, 1)))
    options = {"max_model_len": 64, "max_num_seqs": 2, "page_size": 8, "silent_mode": True}
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    texts = []
    for endpoints in (
        {},
        {"tokenizer_endpoint": endpoint.url, "detokenizer_endpoint": endpoint.url},
    ):
        with eSurge(model, TOKENIZER, compile_runner=False, **options, **endpoints) as engine:
            texts.append(engine.generate("Grüße", params)[0].outputs[0].text)
    assert texts[0] == texts[1]
    assert {"/tokenize", "/detokenize"} == set(endpoint.asked)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("temperature", r"pass SamplingParams\(temperature="),
        ("max_tokens", r"pass SamplingParams\(max_tokens="),
        ("tool", "did you mean 'tools'"),
        ("enable_thinkin", "neither apply_chat_template nor the template reads it"),
        ("tokenize", "no argument 'tokenize'"),
        ("return_tensors", "no argument 'return_tensors'"),
    ],
)
def test_chat_refuses_unknown_arguments(name, words):
    from ed_esurge.engine.surge import eSurge

    source = "{{ messages[0].content if enable_thinking else style }}"
    engine = SimpleNamespace(tokenizer=byte_tokenizer(source))
    for asked in ({name: True}, {name: True, "chat_template": source}):
        with pytest.raises(ConfigError, match=words):
            eSurge.chat(engine, [{"role": "user", "content": "hi"}], **asked)


def test_chat_accepts_what_the_template_or_its_function_reads():
    template = ChatTemplate(byte_tokenizer("{{ style }}"))
    template.check_options({"style": "short", "tools": [], "add_generation_prompt": False})


def test_chat_request_is_rendered_by_the_template():
    ids = ChatTemplate(TOKENIZER).token_ids([{"role": "user", "content": "hi"}])
    assert TOKENIZER.decode(ids) == "<|user|>hi\n<|assistant|>"
    with pytest.raises(ConfigError, match="no chat template"):
        ChatTemplate(byte_tokenizer(chat_template=None))


@pytest.mark.parametrize(
    "content",
    ["a </s> b", "</s>", "<s></s><s>", "plain", "\ufdd00.3c\ufdd1/s>", "\ufdd00.</s>", "< /s>é"],
)
@pytest.mark.parametrize("slow", [False, True])
def test_special_tokens_in_messages_are_encoded_as_text(content, slow):
    """Special tokens of the template are special. In messages and variables they are text."""
    template = "<s>{{ messages[0].content | trim }}|{{ messages[0].name }}|{{ who }}</s>"
    messages = [{"role": "user", "content": content, "name": content}]
    chat = ChatTemplate(TOKENIZER, template)
    if slow:
        chat.__dict__["_text_only"] = None
    ids = chat.token_ids(messages, who=content)
    said = "|".join([content.strip(), content, content])
    text = TOKENIZER(said, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert ids == [TOKENIZER.bos_token_id, *text, TOKENIZER.eos_token_id]


def test_chat_continues_the_last_message():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b</s>c"}]
    chat = ChatTemplate(TOKENIZER)
    ids = chat.token_ids(messages, continue_final_message=True, add_generation_prompt=False)
    assert TOKENIZER.decode(ids) == "<|user|>a\n<|assistant|>b</s>c"
    assert TOKENIZER.eos_token_id not in ids
