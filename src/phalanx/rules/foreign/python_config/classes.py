"""Defaults of a configuration class, if the class is in the program or its repository."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from phalanx.rules.foreign.python_config.expressions import evaluate
from phalanx.rules.foreign.python_config.modules import SourceFile, absolute_name
from phalanx.rules.foreign.python_config.possible_values import Built, PythonReference, UnknownPython

if TYPE_CHECKING:
    from phalanx.rules.foreign.python_config.evaluator import PythonReader

MOST_CLASSES = 24
# Fields of the model's shape, with Megatron Core's names. Other defaults (a sequence length, a number format) are
# overridden elsewhere in a recipe, and are not used.
SHAPE_WORDS = frozenset(
    {
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
        *("gated_linear_unit", "normalization", "layernorm_epsilon", "add_bias_linear", "add_qkv_bias"),
        *("qk_layernorm", "share_embeddings_and_output_weights", "position_embedding_type", "rotary_base"),
        *("num_moe_experts", "moe_ffn_hidden_size", "moe_router_topk", "moe_shared_expert_intermediate_size"),
        *("moe_layer_freq", "moe_router_score_function", "moe_router_topk_scaling_factor"),
        *("moe_router_enable_expert_bias", "multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim"),
        *("qk_pos_emb_head_dim", "v_head_dim", "vocab_size", "make_vocab_size_divisible_by"),
    }
)
# Fields for recomputation: unlike a sequence length, only the recipe overrides them.
RECOMPUTE_WORDS = ("recompute_granularity", "recompute_method", "recompute_num_layers")
# Classes whose layers are not all alike, or are not those of a decoder transformer.
OTHER_LAYERS = re.compile(r"Heterogeneous|Mamba|SSM|Hyena|NemotronH|T5|Bert")
OTHER_WORDS = ("hybrid_override_pattern", "hybrid_attention_ratio", "hybrid_layer_pattern")


@dataclass(eq=False, slots=True)
class ClassDefaults:
    """Fields of a class with their defaults, subclasses overriding bases; and the names of all base classes."""

    fields: dict[str, object] = field(default_factory=dict)
    bases: list[str] = field(default_factory=list)


def read_class(reader: PythonReader, name: str) -> ClassDefaults | None:
    """Return the defaults of a class with this dotted name; None if it is not in the program."""
    defaults = ClassDefaults()
    waiting, num_classes = [name], 0
    while waiting and num_classes < MOST_CLASSES:
        class_name, num_classes = waiting.pop(0), num_classes + 1
        definition = _find_class(reader, class_name)
        if class_name != name and class_name not in defaults.bases:
            defaults.bases.append(class_name)
        if definition is None:
            if class_name == name:
                return None
            continue
        reader.here.append(definition[0])
        try:
            for key, value in _own_fields(reader, definition[1]).items():
                defaults.fields.setdefault(key, value)
            bases = [evaluate(reader, base, None) for base in definition[1].bases]
        finally:
            reader.here.pop()
        waiting = [*(base.name for base in bases if isinstance(base, PythonReference)), *waiting]
    return defaults


def _find_class(reader: PythonReader, name: str) -> tuple[SourceFile, ast.ClassDef] | None:
    """Find the definition of a class, also through packages that re-export it."""
    for _ in range(MOST_CLASSES):
        module, _, last = name.rpartition(".")
        source = reader.package.find_module(module)
        node = source.definitions.get(last) if source is not None else None
        if source is not None and isinstance(node, ast.ClassDef):
            return source, node
        if source is None or not isinstance(node, ast.ImportFrom):
            return None
        alias = next(candidate for candidate in node.names if (candidate.asname or candidate.name) == last)
        name = f"{absolute_name(source, node)}.{alias.name}"
    return None


def _own_fields(reader: PythonReader, node: ast.ClassDef) -> dict[str, object]:
    fields: dict[str, object] = {}
    for statement in node.body:
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and statement.value is not None
        ):
            fields[statement.target.id] = _default_of(reader, statement.value)
        elif (
            isinstance(statement, ast.Assign)
            and len(statement.targets) == 1
            and isinstance(statement.targets[0], ast.Name)
        ):
            fields[statement.targets[0].id] = _default_of(reader, statement.value)
        elif isinstance(statement, ast.FunctionDef) and statement.name == "__post_init__":
            fields |= {
                target.attr: UnknownPython(f"is set by {node.name}.__post_init__, which is not followed")
                for target in ast.walk(statement)
                if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store)
            }
    return fields


def _default_of(reader: PythonReader, node: ast.expr) -> object:
    """Return a field's default, also from `field(default=…)` and `field(default_factory=lambda: …)` of dataclasses."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("field"):
        options = {keyword.arg: keyword.value for keyword in node.keywords}
        if "default" in options:
            return evaluate(reader, options["default"], None)
        factory = options.get("default_factory")
        return (
            evaluate(reader, factory.body, None)
            if isinstance(factory, ast.Lambda)
            else UnknownPython("is made by a function that is not followed")
        )
    return evaluate(reader, node, None)


def fill_model_shape(reader: PythonReader, recipe: Built) -> None:
    """Fill in shape fields that a recipe's model leaves open with the defaults of its classes."""
    model = recipe.fields.get("model")
    inner = model.fields.get("config") if isinstance(model, Built) else None
    for config in (model, inner):
        if not isinstance(config, Built) or not config.kind:
            continue
        kind = config.kind.rpartition(" ")[2]
        class_defaults = read_class(reader, kind)
        bases = class_defaults.bases if class_defaults is not None else []
        class_fields = class_defaults.fields if class_defaults is not None else {}
        for word in RECOMPUTE_WORDS:
            if word in class_fields:
                config.fields.setdefault(word, class_fields[word])
        if OTHER_LAYERS.search(" ".join((kind, *bases)).replace("TransformerConfig", "")) or any(
            word in class_fields or word in config.fields for word in OTHER_WORDS
        ):
            reason = f"is that of {kind.rpartition('.')[2]}, whose layers are not all alike"
            config.fields |= {word: UnknownPython(reason) for word in ("num_layers", "hidden_size", "ffn_hidden_size")}
            # The only family of NeMo whose classes set recomputation
            if class_defaults is None and "Hyena" in kind:
                config.fields.setdefault(RECOMPUTE_WORDS[0], UnknownPython(f"is that of {kind.rpartition('.')[2]}"))
            continue
        for word in SHAPE_WORDS:
            if word in class_fields and word not in config.fields:
                config.fields[word] = class_fields[word]
        if bases and not config.opened:
            config.fields["_bases_"] = bases
