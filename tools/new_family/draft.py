"""A draft of a family, and its source in the form of the files of `ed_models.families`."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

from tools.workspace import ROOT

#: Name in the source of a family -> the module that it is imported from.
IMPORTS = {
    "replace": "dataclasses",
    "partial": "functools",
    "ALL_LAYERS": "ed_layers.context",
    "ConfigError": "ed_infra.errors",
    "RopeSettings": "ed_infra.rope.frequencies",
    "SelfAttention": "ed_layers.attention.blocks.self_attention",
    "LatentAttention": "ed_layers.attention.blocks.latent_attention",
    "MaskRule": "ed_layers.attention.blocks.settings",
    "QKNorm": "ed_layers.attention.blocks.settings",
    "Rotary": "ed_layers.attention.blocks.settings",
    "ScoreRule": "ed_layers.attention.blocks.settings",
    "GatedMLP": "ed_layers.mlp",
    "MLP": "ed_layers.mlp",
    "Experts": "ed_layers.moe.experts",
    "Router": "ed_layers.moe.layer",
    "SparseMLP": "ed_layers.moe.layer",
    "Modules": "ed_models.adapters.peft_layout",
    "Decoder": "ed_models.body.decoder",
    "ScaledDecoder": "ed_models.body.decoder",
    "DecoderLayer": "ed_models.body.layers",
    "SandwichLayer": "ed_models.body.layers",
    "PostNormLayer": "ed_models.body.layers",
    "ParallelLayer": "ed_models.body.layers",
    "get_layer_window": "ed_models.body.layers",
    "rope_kind": "ed_models.body.layers",
    "has_experts": "ed_models.body.experts",
    "build_theta_settings": "ed_models.body.context",
    "STANDARD": "ed_models.weights.rules",
    "EXPERTS": "ed_models.weights.rules",
    "Rule": "ed_models.weights.rules",
    "equal": "ed_models.weights.rules",
    "fused": "ed_models.weights.rules",
    "ignore": "ed_models.weights.rules",
    "renamed": "ed_models.weights.rules",
    "split": "ed_models.weights.rules",
    "transpose": "ed_models.weights.rules",
}
#: A file whose place decides about the order of imports.
STYLE_OF = str(ROOT / "packages/ed-models/src/ed_models/families/llama.py")
#: Class of a layer -> what its docstring says about the norms.
NORMED = {
    "DecoderLayer": "each normed before and added to the stream",
    "SandwichLayer": "each normed before and after",
    "PostNormLayer": "each normed after",
    "ParallelLayer": "side by side behind one norm",
}


@dataclass(frozen=True)
class Sparse:
    """The experts of a family, as expressions.

    Attributes:
        experts, per_token: numbers of experts, of the model and of a token.
        router: further arguments of `Router`.
        size: intermediate size of an expert.
        shared: intermediate size of the shared experts; None = no shared experts.
        is_shared_optional: whether a size of 0 stands for no shared experts.
        expert_arguments: further arguments of `Experts`.
        arguments: further arguments of `SparseMLP`.
        condition: whether layer `index` has experts; None = each layer.
    """

    experts: str
    per_token: str
    size: str
    router: dict[str, str] = field(default_factory=dict)
    shared: str | None = None
    is_shared_optional: bool = False
    expert_arguments: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    condition: str | None = None


@dataclass(frozen=True)
class Draft:
    """A family in the vocabulary of this project; all values are expressions of its source.

    Attributes:
        model_type: `model_type` of config.json.
        stem: prefix of the class names.
        config_class, model_class: names of the classes of transformers.
        title: first line of the description. bullets: the differences.
        modeling: name of the modeling file.
        layer: class of the layer. layer_arguments: its further arguments.
        attention_class: class of the attention. attention: its arguments.
        feed_forward: class of the dense layer. feed_forward_arguments: its arguments.
        sparse: the experts, or None.
        norm: what `build_norm` returns; None = the norm of `Parts`.
        scaled: whether token embeddings are multiplied by the root of the hidden size.
        enter: statements of `enter`, where `x` is the stream.
        positions: size and offset of learned positions; None = none.
        rope_settings: what `rope_settings` returns; None = the settings of the configuration.
        kinds: what `layer_kinds` returns; None = the types of the layers.
        head: arguments of `replace` for the head. head_bias: whether the head has a bias.
        renames: parts of our names -> parts of theirs.
        modules: parts of the names of matrices in files -> their modules in memory.
        rules: further rules of the weights, in front of the standard ones.
        attributes: entries of `attribute_map` of the configuration.
        properties: properties of the configuration: name -> (type, expression, description).
        fixed: Boolean fields whose other value has other layers: name -> the value of this family.
    """

    model_type: str
    stem: str
    config_class: str
    model_class: str
    title: str
    modeling: str
    bullets: tuple[str, ...] = ()
    layer: str = "DecoderLayer"
    layer_arguments: dict[str, str] = field(default_factory=dict)
    attention_class: str = "SelfAttention"
    attention: dict[str, str] = field(default_factory=dict)
    feed_forward: str = "GatedMLP"
    feed_forward_arguments: dict[str, str] = field(default_factory=dict)
    sparse: Sparse | None = None
    norm: str | None = None
    scaled: bool = False
    enter: tuple[str, ...] = ()
    positions: tuple[str, int] | None = None
    rope_settings: str | None = None
    kinds: str | None = None
    head: dict[str, str] = field(default_factory=dict)
    head_bias: str | None = None
    renames: dict[str, str] = field(default_factory=dict)
    rules: tuple[str, ...] = ()
    modules: dict[str, str] = field(default_factory=dict)
    attributes: dict[str, str] = field(default_factory=dict)
    properties: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    fixed: dict[str, bool] = field(default_factory=dict)

    @property
    def class_name(self) -> str:
        """The name of the class with the head."""
        is_own = self.model_class.startswith(self.stem)
        return self.model_class if is_own else f"{self.stem}ForCausalLM"

    @property
    def source(self) -> str:
        """The source of the family, formatted."""
        return format_source(self.head_of_file() + self.classes())

    def head_of_file(self) -> str:
        """Return the description and the imports."""
        bullets = "".join(f"\n{_wrap_bullet(bullet)}" for bullet in self.bullets)
        numbers = (
            f"Numbers follow Hugging Face's `{self.modeling}.py`; parameter names are its names."
        )
        parts = [
            textwrap.fill(self.title, 97, break_on_hyphens=False),
            *([bullets.lstrip("\n")] if bullets else []),
            textwrap.fill(numbers, 100),
        ]
        body = self.classes()
        names: dict[str, set[str]] = {
            "ed_infra.config": {"EasyDeLBaseConfig"},
            "ed_infra.enums": {"TaskType"},
            "ed_infra.registry": {"register_config", "register_module"},
            "ed_layers.parts": {"Parts"},
            "ed_models.tasks.causal_lm": {"CausalLM"},
        }
        for name, module in IMPORTS.items():
            if re.search(rf"(?<![\w.]){name}\b", body):
                names.setdefault(module, set()).add(name)
        lines = [
            f"from {module} import {', '.join(sorted(of))}" for module, of in sorted(names.items())
        ]
        first = [line for line in lines if line.startswith(("from dataclasses", "from functools"))]
        own = [line for line in lines if line.startswith("from ed_models")]
        rest = [line for line in lines if line not in (*first, *own)]
        groups = ["\n".join(first), "\n".join(["import transformers", *rest]), "\n".join(own)]
        imports = "\n\n".join(group for group in groups if group)
        text = "\n\n".join(parts)
        return f'"""{text}\n"""\n\nfrom __future__ import annotations\n\n{imports}\n\n\n'

    def classes(self) -> str:
        """Return the classes of the family."""
        return "\n\n".join(
            (self.config_source(), self.layer_source(), self.body_source(), self.head_source())
        )

    def config_source(self) -> str:
        """Return the class of the configuration."""
        theirs = f"transformers.{self.config_class}"
        lines = [f'    model_type = "{self.model_type}"']
        if self.attributes:
            entries = ", ".join(f'"{ours}": "{field}"' for ours, field in self.attributes.items())
            lines.append(f"    attribute_map = {{**{theirs}.attribute_map, {entries}}}")
        for name, (kind, value, text) in self.properties.items():
            lines.append(f'\n    @property\n    def {name}(self) -> {kind}:\n        """{text}"""')
            lines.append(f"        return {value}")
        if self.fixed:
            lines.append(
                "\n    def validate(self):\n"
                '        """Refuse fields whose other values have other layers."""\n'
                "        super().validate()"
            )
        for name, value in self.fixed.items():
            lines.append(
                f"        if self.{name} is not {value}:\n            raise ConfigError(\n"
                f'                "{self.model_type}: {name}={not value} has other layers, which '
                f'are not supported: "\n                "use a checkpoint with {name}={value}"\n'
                "            )"
            )
        return (
            f'@register_config("{self.model_type}")\n'
            f"class {self.stem}Config(EasyDeLBaseConfig, {theirs}):\n"
            '    """Architecture fields from `transformers`, execution fields from '
            '`EasyDeLBaseConfig`."""\n\n' + "\n".join(lines) + "\n\n"
        )

    def layer_source(self) -> str:
        """Return the class of the layer."""
        mixed = "experts" if self.sparse is not None else "feed-forward"
        name = f"{self.attention_class}({_join('parts', self.attention)})"
        dense = f"{self.feed_forward}({_join('parts', self.feed_forward_arguments)})"
        statements, mlp = [], dense
        if self.sparse is not None:
            statements, mlp = self.sparse_statements(dense)
        call = _join("parts", {"self_attn": name, "mlp": mlp, **self.layer_arguments})
        config = f"config: {self.stem}Config = parts.config"
        lines = [*statements, f"super().__init__({call})"]
        if "config" in " ".join(lines):
            lines.insert(0, config)
        body = "\n".join(f"        {line}" for line in lines)
        normed = NORMED[self.layer]
        if self.layer == "ParallelLayer" and "norms" in self.layer_arguments:
            normed = "side by side, each behind a norm"
        return (
            f"class {self.stem}DecoderLayer({self.layer}):\n"
            f'    """Attention and {mixed}, {normed}."""\n\n'
            f"    def __init__(self, parts: Parts, index: int):\n{body}\n\n"
        )

    def sparse_statements(self, dense: str) -> tuple[list[str], str]:
        """Return the statements that create the experts, and the feed-forward part of a layer."""
        sparse = self.sparse
        assert sparse is not None
        experts = _join(f"parts, experts, {sparse.size}", sparse.expert_arguments)
        arguments = {
            "gate": f"Router({_join('parts, experts, k', sparse.router)})",
            "experts": f"Experts({experts})",
        }
        if sparse.shared is not None:
            shared = f"GatedMLP(parts, {sparse.shared})"
            size = sparse.shared.partition(",")[0]
            arguments["shared"] = (
                f"{shared} if {size} else None" if sparse.is_shared_optional else shared
            )
        call = f"SparseMLP({_join('parts', {**arguments, **sparse.arguments})})"
        numbers = f"experts, k = {sparse.experts}, {sparse.per_token}"
        if sparse.condition is None:
            return [numbers, f"mlp = {call}"], "mlp"
        return [
            numbers,
            f"sparse = {sparse.condition}",
            f"mlp = {call} if sparse else {dense}",
        ], "mlp"

    def body_source(self) -> str:
        """Return the class of the body."""
        base = "ScaledDecoder" if self.scaled else "Decoder"
        methods = []
        if self.kinds is not None:
            methods.append(
                f"    @staticmethod\n    def layer_kinds(config):\n        return {self.kinds}\n"
            )
        if self.norm is not None:
            methods.append(
                f"    @staticmethod\n    def build_norm(parts):\n        return {self.norm}\n"
            )
        enter = list(self.enter)
        if self.positions is not None:
            rows, offset = self.positions
            total = f"{rows} + {offset}" if offset else rows
            methods.append(
                "    def add_parts(self, parts):\n        config = parts.config\n"
                f"        self.embed_positions = parts.embed({total}, config.hidden_size)\n"
            )
            at = f"ctx.position_ids + {offset}" if offset else "ctx.position_ids"
            enter.insert(
                len(enter) - sum("dropout" in e for e in enter), f"x + self.embed_positions({at})"
            )
        if enter:
            *before, last = enter
            lines = [*(f"        x = {value}\n" for value in before), f"        return {last}\n"]
            methods.append("    def enter(self, x, ctx):\n" + "".join(lines))
        if self.rope_settings is not None:
            methods.append(f"    def rope_settings(self):\n        return {self.rope_settings}\n")
        return (
            f"class {self.stem}Model({base}):\n"
            '    """Embedding, decoder layers, final norm."""\n\n'
            f"    config_class = {self.stem}Config\n    layer_class = {self.stem}DecoderLayer\n\n"
            + "\n".join(methods)
            + "\n"
        )

    def head_source(self) -> str:
        """Return the class of the model with its head."""
        lines = [f"    body_class = {self.stem}Model\n"]
        if self.class_name != self.model_class:  # a type with the classes of another one
            lines = [f'{lines[0]}    architecture = "{self.model_class}"\n']
        if self.renames or self.rules:
            rules = ", ".join((*self.rules, "*STANDARD"))
            names = ", ".join(f'"{ours}": "{theirs}"' for ours, theirs in self.renames.items())
            table = f"renamed({{{names},}}, {rules})" if names else f"({rules})"
            lines.append(f"    WEIGHTS = {table}\n")
        if self.modules:
            names = ", ".join(f'"{theirs}": "{ours}"' for theirs, ours in self.modules.items())
            lines.append(f"    MODULES = Modules({{{names}}})\n")
        if self.head_bias is not None:
            lines.append(
                f"    @property\n    def head_bias(self):\n        return {self.head_bias}\n"
            )
        if self.head:
            arguments = ", ".join(f"{name}={value}" for name, value in self.head.items())
            lines.append(
                f"    def head(self):\n        return replace(super().head(), {arguments})\n"
            )
        return (
            f"@register_module(TaskType.CAUSAL_LM, config={self.stem}Config, "
            f'model_type="{self.model_type}")\n'
            f"class {self.class_name}(CausalLM):\n"
            f'    """{self.stem} with a language-model head."""\n\n' + "\n".join(lines)
        )


def _join(first: str, arguments: dict[str, str]) -> str:
    named = [f"{name}={value}" if name[0] != "*" else value for name, value in arguments.items()]
    return ", ".join([first, *named])


def _wrap_bullet(text: str) -> str:
    return textwrap.fill(
        text, 100, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False
    )


def format_source(text: str) -> str:
    """Return a source in the style of this repository, if ruff is installed."""
    ruff = Path(sys.executable).with_name("ruff")
    program = str(ruff) if ruff.is_file() else shutil.which("ruff")
    if program is None:
        return text
    for command in (["check", "--select", "I", "--fix", "--quiet"], ["format", "--quiet"]):
        done = subprocess.run(
            [program, *command, "--stdin-filename", STYLE_OF, "-"],
            input=text,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ValueError(f"the drafted source is not valid: {done.stderr}")
        text = done.stdout
    return text
