"""The defaults that a configuration class gives its objects, where the class lies in the program or its repository."""

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
# What a class says of the model's shape, in Megatron Core's words. Other defaults of its fields (a sequence length, a
# number format) are overruled elsewhere in a recipe, and are not taken.
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
# What a class may say of recomputation: unlike a sequence length, nothing but the recipe overrules it.
RECOMPUTE_WORDS = ("recompute_granularity", "recompute_method", "recompute_num_layers")
# Classes whose layers are not all alike, or are none of a decoder transformer.
OTHER_LAYERS = re.compile(r"Heterogeneous|Mamba|SSM|Hyena|NemotronH|T5|Bert")
OTHER_WORDS = ("hybrid_override_pattern", "hybrid_attention_ratio", "hybrid_layer_pattern")


@dataclass(eq=False, slots=True)
class ClassDefaults:
    """Fields with their defaults, those of subclasses over those of bases; and all classes on the way."""

    fields: dict[str, object] = field(default_factory=dict)
    bases: list[str] = field(default_factory=list)


def read_class(reader: PythonReader, name: str) -> ClassDefaults | None:
    """What a class of this dotted name gives; None where it is not in the program."""
    found = ClassDefaults()
    waiting, seen = [name], 0
    while waiting and seen < MOST_CLASSES:
        one, seen = waiting.pop(0), seen + 1
        place = _find_class(reader, one)
        if one != name and one not in found.bases:
            found.bases.append(one)
        if place is None:
            if one == name:
                return None
            continue
        reader.here.append(place[0])
        try:
            for key, value in _own_fields(reader, place[1]).items():
                found.fields.setdefault(key, value)
            bases = [evaluate(reader, base, None) for base in place[1].bases]
        finally:
            reader.here.pop()
        waiting = [*(base.name for base in bases if isinstance(base, PythonReference)), *waiting]
    return found


def _find_class(reader: PythonReader, name: str) -> tuple[SourceFile, ast.ClassDef] | None:
    """Also where a package only hands it on."""
    for _ in range(MOST_CLASSES):
        module, _, last = name.rpartition(".")
        source = reader.package.find_module(module)
        node = source.definitions.get(last) if source is not None else None
        if source is not None and isinstance(node, ast.ClassDef):
            return source, node
        if source is None or not isinstance(node, ast.ImportFrom):
            return None
        alias = next(one for one in node.names if (one.asname or one.name) == last)
        name = f"{absolute_name(source, node)}.{alias.name}"
    return None


def _own_fields(reader: PythonReader, node: ast.ClassDef) -> dict[str, object]:
    found: dict[str, object] = {}
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and one.value is not None:
            found[one.target.id] = _default_of(reader, one.value)
        elif isinstance(one, ast.Assign) and len(one.targets) == 1 and isinstance(one.targets[0], ast.Name):
            found[one.targets[0].id] = _default_of(reader, one.value)
        elif isinstance(one, ast.FunctionDef) and one.name == "__post_init__":
            found |= {
                target.attr: UnknownPython(f"is set by {node.name}.__post_init__, which is not followed")
                for target in ast.walk(one)
                if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store)
            }
    return found


def _default_of(reader: PythonReader, node: ast.expr) -> object:
    """`field(default=…)` and `field(default_factory=lambda: …)` of dataclasses."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("field"):
        given = {one.arg: one.value for one in node.keywords}
        if "default" in given:
            return evaluate(reader, given["default"], None)
        factory = given.get("default_factory")
        return (
            evaluate(reader, factory.body, None)
            if isinstance(factory, ast.Lambda)
            else UnknownPython("is made by a function that is not followed")
        )
    return evaluate(reader, node, None)


def fill_model_shape(reader: PythonReader, recipe: Built) -> None:
    """Write what the classes of a recipe's model say of its shape into the model, where the recipe leaves it open."""
    model = recipe.fields.get("model")
    inner = model.fields.get("config") if isinstance(model, Built) else None
    for one in (model, inner):
        if not isinstance(one, Built) or not one.kind:
            continue
        kind = one.kind.rpartition(" ")[2]
        found = read_class(reader, kind)
        bases = found.bases if found is not None else []
        given = found.fields if found is not None else {}
        for word in RECOMPUTE_WORDS:
            if word in given:
                one.fields.setdefault(word, given[word])
        if OTHER_LAYERS.search(" ".join((kind, *bases)).replace("TransformerConfig", "")) or any(
            word in given or word in one.fields for word in OTHER_WORDS
        ):
            why = f"is that of {kind.rpartition('.')[2]}, whose layers are not all alike"
            one.fields |= {word: UnknownPython(why) for word in ("num_layers", "hidden_size", "ffn_hidden_size")}
            if found is None and "Hyena" in kind:  # the only family of NeMo's whose classes ask for recomputation
                one.fields.setdefault(RECOMPUTE_WORDS[0], UnknownPython(f"is that of {kind.rpartition('.')[2]}"))
            continue
        for word in SHAPE_WORDS:
            if word in given and word not in one.fields:
                one.fields[word] = given[word]
        if bases and not one.opened:
            one.fields["_bases_"] = bases
