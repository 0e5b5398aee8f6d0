"""Sentences for the facts of a draft: the description of a generated file."""

from __future__ import annotations

from tools.new_family.draft import Draft


def describe(draft: Draft) -> list[str]:
    """Return a phrase for each property in which families differ."""
    return [
        *_describe_layer(draft),
        *_describe_attention(draft),
        *_describe_mixers(draft),
        *_describe_ends(draft),
    ]


def _describe_layer(draft: Draft) -> list[str]:
    phrases = {
        "SandwichLayer": ["further norms behind attention and feed-forward"],
        "PostNormLayer": ["norms behind attention and feed-forward instead of before"],
        "ParallelLayer": ["attention and feed-forward in parallel"],
    }.get(draft.layer, [])
    if draft.norm is not None and "layer_norm" in draft.norm:
        phrases = [
            *phrases,
            "layer norms" + (" without biases" if "bias=False" in draft.norm else ""),
        ]
    elif draft.norm is not None and "offset" in draft.norm:
        phrases = [*phrases, "norms that add one to their weights"]
    if "factor" in draft.layer_arguments:
        phrases = [*phrases, "a factor on what a layer adds to the stream"]
    return phrases


def _describe_attention(draft: Draft) -> list[str]:
    arguments, phrases = draft.attention, []
    if draft.attention_class == "LatentAttention":
        phrases.append("keys and values that each layer computes from a latent of each token")
    mask, position = arguments.get("mask", ""), arguments.get("position", "Rotary()")
    if "get_layer_window" in mask:
        phrases.append("a window in layers of type `sliding_attention`")
    elif "attention_layers" in mask:
        phrases.append("a window of `window_size` tokens in local layers")
    elif mask:
        phrases.append("a window of `sliding_window` tokens in all layers")
    if "layer_rope_theta" in position:
        phrases.append("a base frequency of the rotary positions for each layer; 0 is none")
    elif " if config.no_rope_layers" in position:
        phrases.append("rotary positions in layers that `no_rope_layers` selects")
    elif " if " in position:
        phrases.append("rotary positions only in the layers with a window")
    if "rope_kind" in position:
        phrases.append("rotary frequencies for each type of layer")
    if "interleaved" in position:
        phrases.append("rotary pairs of neighbours")
    norm = arguments.get("norm", "")
    if norm:
        where = "over all heads together" if '"all"' in norm else "by head"
        when = ", after the rotary positions" if "last" in norm else ""
        switch = norm.partition(" if config.")[2].split(" ")[0]
        phrases.append(
            f"norms of queries and keys {where}{when}" + (f" (`{switch}`)" if switch else "")
        )
    scores = arguments.get("scores", "")
    if "sinks" in scores:
        phrases.append("a trained logit of each head in the softmax (a sink)")
    if "soft_cap" in scores:
        phrases.append("a bound of the scores")
    if "gated" in arguments:
        phrases.append("a sigmoid gate on the outputs of the attention")
    if arguments.get("bias") == "True":
        out = " but the last" if arguments.get("out_bias") == "False" else ""
        phrases.append(f"biases in all projections of the attention{out}")
    return phrases


def _describe_mixers(draft: Draft) -> list[str]:
    phrases, sparse = [], draft.sparse
    if draft.feed_forward == "MLP":
        phrases.append("a feed-forward without a gate")
    if sparse is not None:
        count, chosen = (
            sparse.experts.removeprefix("config."),
            sparse.per_token.removeprefix("config."),
        )
        kind = "sigmoids" if "score" in sparse.router else "a softmax"
        phrases.append(f"`{chosen}` of `{count}` experts for each token, weighted by {kind}")
        if "selection_bias" in sparse.router:
            phrases.append("a bias that takes part only in the choice of experts")
        if sparse.shared is not None:
            phrases.append("shared experts for all tokens")
    return phrases


def _describe_ends(draft: Draft) -> list[str]:
    phrases = []
    if draft.positions is not None:
        phrases.append("learned positions that are added to the embeddings")
    if draft.scaled or any("dropout" not in entry for entry in draft.enter):
        phrases.append("a factor on the embeddings")
    if "scale" in draft.head:
        phrases.append("a factor on the logits")
    if "soft_cap" in draft.head:
        phrases.append("a bound of the logits")
    return phrases


def write_title(
    stem: str, authors: str, base: str | None, phrases: list[str], base_phrases: list[str]
) -> str:
    """Return the first line of the description.

    Args:
        stem: prefix of the class names. authors: authors and year.
        base: prefix of the class names of the parent.
        phrases, base_phrases: the facts of the type and of its parent.
    """
    name = f"{stem} ({authors})" if authors else stem
    new = [phrase for phrase in phrases if phrase not in base_phrases]
    lost = [phrase for phrase in base_phrases if phrase not in phrases]
    if base is None:
        return f"{name}: a decoder with {join_phrases(new[:2])}." if new else f"{name}: a decoder."
    if not new and lost:
        return f"{name}: {base} without {join_phrases(lost[:2])}."
    if not new:
        return f"{name}: the layers of {base}."
    return f"{name}: {base} with {join_phrases(new[:2])}."


def join_phrases(phrases: list[str]) -> str:
    """Join phrases as in a sentence."""
    return " and ".join(phrases)
