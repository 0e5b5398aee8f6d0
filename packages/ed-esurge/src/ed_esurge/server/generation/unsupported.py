"""Fields of other servers that would change the answer, and that this server does not implement.

Ignoring such a field would give another answer than the client asked for, so it is refused by name
unless its value asks for nothing.
"""

from __future__ import annotations

from ed_esurge.server.http.fields import Body, unsupported

_DRAFTS = "send temperature, top_k, top_p and min_p"


class OtherSamplers(Body):
    """Sampling fields of vLLM, SGLang, llama.cpp and text-generation-inference."""

    use_beam_search: unsupported("beam search; send n or best_of", False) = None  # type: ignore[valid-type]
    length_penalty: unsupported("beam search", 1, 1.0) = None  # type: ignore[valid-type]
    early_stopping: unsupported("beam search", False) = None  # type: ignore[valid-type]
    logits_processors: unsupported(  # type: ignore[valid-type]
        "code of clients; send logit_bias, allowed_token_ids or bad_words", []
    ) = None
    custom_logit_processor: unsupported(  # type: ignore[valid-type]
        "code of clients; send logit_bias, allowed_token_ids or bad_words"
    ) = None
    repetition_detection: unsupported(  # type: ignore[valid-type]
        "repetition_detection; send repetition_penalty"
    ) = None
    thinking_token_budget: unsupported(  # type: ignore[valid-type]
        "thinking_token_budget; send max_tokens, or reasoning_effort", -1
    ) = None
    kv_transfer_params: unsupported("transfers of pages between servers", {}) = None  # type: ignore[valid-type]
    vllm_xargs: unsupported("vllm_xargs; send the fields of this API", {}) = None  # type: ignore[valid-type]
    prompt_embeds: unsupported("embeddings as a prompt; send text or token ids", []) = None  # type: ignore[valid-type]
    return_tokens_as_token_ids: unsupported("send return_token_ids", False) = None  # type: ignore[valid-type]
    guided_whitespace_pattern: unsupported("send guided_grammar") = None  # type: ignore[valid-type]
    typical_p: unsupported(f"typical_p; {_DRAFTS}", 1, 1.0) = None  # type: ignore[valid-type]
    mirostat: unsupported(f"mirostat; {_DRAFTS}", 0) = None  # type: ignore[valid-type]
    dry_multiplier: unsupported("dry_multiplier; send repetition_penalty", 0, 0.0) = None  # type: ignore[valid-type]
    xtc_probability: unsupported(f"xtc_probability; {_DRAFTS}", 0, 0.0) = None  # type: ignore[valid-type]
    repeat_penalty: unsupported("send repetition_penalty", 1, 1.0) = None  # type: ignore[valid-type]


class OtherTemplates(Body):
    """Fields of vLLM's chat requests about the template and what it is given."""

    chat_template: unsupported(  # type: ignore[valid-type]
        "templates of clients; start the server with chat_template"
    ) = None
    documents: unsupported("documents; put them into a message", []) = None  # type: ignore[valid-type]
    mm_processor_kwargs: unsupported("this model takes text only", {}) = None  # type: ignore[valid-type]
    echo: unsupported("echo of a conversation; use /v1/completions", False) = None  # type: ignore[valid-type]
    add_special_tokens: unsupported("the chat template writes them", False) = None  # type: ignore[valid-type]
    best_of: unsupported("best_of of a conversation; send n", 1) = None  # type: ignore[valid-type]
    include_reasoning: unsupported(  # type: ignore[valid-type]
        "leaving thoughts out; ignore reasoning_content", True
    ) = None
