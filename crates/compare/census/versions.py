"""What differs between the versions of transformers that the census runs on."""

import inspect

import transformers
from packaging.version import Version
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

try:
    from transformers import PreTrainedConfig
except ImportError:
    from transformers import PretrainedConfig as PreTrainedConfig
try:
    from transformers.integrations.heterogeneity.configuration_utils import AmbiguousGlobalPerLayerAttributeError
except ImportError:
    # No version before has fields that layers give differently.
    class AmbiguousGlobalPerLayerAttributeError(AttributeError):
        pass


VERSION = Version(transformers.__version__)
# What hybrid models call their two kinds of layers.
RECURRENT_LAYER, SOFTMAX_LAYER = (
    ("linear_attention", "full_attention") if VERSION >= Version("5.13") else ("mamba", "attention")
)


def field_of(config, name):
    """A field, or that of most layers where each may have its own."""
    try:
        return getattr(config, name, None)
    except AmbiguousGlobalPerLayerAttributeError:
        return config.to_dict()[name]


def fields_of(config_class):
    """The names of the fields that a class of configurations declares."""
    if hasattr(config_class, "__dataclass_fields__"):
        return list(config_class.__dataclass_fields__)
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(config_class.__init__).parameters.values()
    own = [parameter.name for parameter in parameters if parameter.kind in named and parameter.name != "self"]
    # In versions before 5 every class has it without declaring it.
    decodes = getattr(config_class, "model_type", "") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return list(dict.fromkeys([*own, "is_decoder"] if decodes else own))


def spelled(usual, fields):
    """Fields of a configuration in the words of this version; `usual` is one with the defaults."""
    fields = dict(fields)
    declared = fields_of(type(usual))
    if "rope_parameters" in fields and "rope_parameters" not in declared:
        scaling = dict(fields.pop("rope_parameters"))
        for name in ("rope_theta", "partial_rotary_factor"):
            if name in scaling and name in declared:
                fields[name] = scaling.pop(name)
        fields["rope_scaling"] = scaling
    if "backbone_config" in fields and VERSION.major < 5:
        fields |= {"backbone": None, "use_timm_backbone": False, "use_pretrained_backbone": False}
    return fields
