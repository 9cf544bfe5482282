"""Parts of models: those that transformers does not make as a model, and those that are run alone, with their inputs."""

import importlib
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel


@dataclass
class Part:
    """A part that is no model of its own: its class, and its name in the whole model."""

    class_name: str
    name: str


DECODER = "mask_decoder"
PARTS = {
    "edgetam_mask_decoder": Part("EdgeTamMaskDecoder", DECODER),
    "edgetam_video_mask_decoder": Part("EdgeTamVideoMaskDecoder", DECODER),
    "sam2_mask_decoder": Part("Sam2MaskDecoder", DECODER),
    "sam2_video_mask_decoder": Part("Sam2VideoMaskDecoder", DECODER),
    "sam3_geometry_encoder": Part("Sam3GeometryEncoder", "geometry_encoder"),
    "sam3_lite_text_geometry_encoder": Part("Sam3LiteTextGeometryEncoder", "geometry_encoder"),
    "sam3_tracker_mask_decoder": Part("Sam3TrackerMaskDecoder", DECODER),
    "sam3_tracker_video_mask_decoder": Part("Sam3TrackerVideoMaskDecoder", DECODER),
    "sam_hq_mask_decoder": Part("SamHQMaskDecoder", DECODER),
    "sam_mask_decoder": Part("SamMaskDecoder", DECODER),
}

# The modules of transformers that have a model, where these are not named after its configuration.
MODULES = {"blip_text_model": "transformers.models.blip.modeling_blip_text"}

# The module of a model, below its head, whose attention is the model's own, and which is run by itself.
RUN_ALONE = {
    "kosmos-2": "image_to_text_projection",
    "sam": DECODER,
    "sam2": DECODER,
    "sam3": "geometry_encoder",
    "sam3_lite_text": "geometry_encoder",
    "sam3_tracker": DECODER,
    "sam_hq": DECODER,
    "tvp": "encoder",
}


def module_of(config_class):
    """The module of transformers that has the model of a configuration."""
    name = config_class.__module__.replace("configuration_", "modeling_")
    return importlib.import_module(MODULES.get(config_class.model_type, name))


def as_models(config_class):
    """The class of models that have the part of a configuration alone, in a list; empty for other configurations."""
    part = PARTS.get(config_class.model_type)
    if part is None:
        return []
    part_class = getattr(module_of(config_class), part.class_name)

    class Alone(PreTrainedModel):
        def __init__(self, config):
            super().__init__(config)
            setattr(self, part.name, part_class(config))
            self.post_init()

        def forward(self, **inputs):
            return getattr(self, part.name)(**inputs)

    Alone.config_class = config_class
    return [Alone]


def target(model):
    """The module that is run."""
    name = RUN_ALONE.get(model.config.model_type)
    return model.base_model.get_submodule(name) if name else model


def of(config, name):
    """The configuration of a part, or the configuration itself if it is that of the part."""
    return getattr(config, name, config)


def prompted(config, **others):
    """An image of 4 x 4, and three points or corners."""
    width = of(config, "mask_decoder_config").hidden_size
    return {
        "image_embeddings": torch.randn(2, width, 4, 4),
        "image_positional_embeddings": torch.randn(2, width, 4, 4),
        "sparse_prompt_embeddings": torch.randn(2, 1, 3, width),
        "dense_prompt_embeddings": torch.randn(2, width, 4, 4),
        "multimask_output": True,
    } | others


def prompted_finely(config):
    """The same, with features of the image at higher resolutions."""
    width = of(config, "mask_decoder_config").hidden_size
    fine = [torch.randn(2, width // 8, 16, 16), torch.randn(2, width // 4, 8, 8)]
    return prompted(config, high_resolution_features=fine)


def boxes(config):
    """Three boxes in an image."""
    width = of(config, "geometry_encoder_config").hidden_size
    return {
        "box_embeddings": torch.rand(2, 3, 4) / 2 + 0.25,
        "box_mask": torch.ones(2, 3, dtype=torch.bool),
        "box_labels": torch.zeros(2, 3, dtype=torch.long),
        "img_feats": (torch.randn(2, width, 8, 8),),
        "img_pos_embeds": (torch.randn(2, width, 8, 8),),
    }


def image_and_text(config):
    width = config.hidden_size
    return {
        "vision_features": [torch.randn(2, width, 4, 4)],
        "text_features": torch.randn(2, 5, width),
        "vision_pos_embeds": [torch.randn(2, width, 4, 4)],
    }


def placed_image_and_text(config):
    """Without the shape of the image, the scores of boxes and image have no bias."""
    width = config.hidden_size
    return {
        "vision_features": torch.randn(2, 16, width),
        "text_features": torch.randn(2, 5, width),
        "vision_pos_encoding": torch.randn(2, 16, width),
    }


def queries_and_prompt(config):
    width = config.hidden_size
    return {
        "decoder_queries": torch.randn(2, 7, width),
        "backbone_features": [torch.randn(2, width, size, size) for size in (16, 8, 4)],
        "encoder_hidden_states": torch.randn(2, 16, width),
        "prompt_features": torch.randn(2, 5, width),
    }


INPUTS = {
    "edgetam_mask_decoder": prompted_finely,
    "edgetam_video_mask_decoder": prompted_finely,
    "kosmos-2": lambda config: {"features": torch.randn(2, 9, config.vision_config.hidden_size)},
    "sam": prompted,
    "sam2": prompted_finely,
    "sam2_mask_decoder": prompted_finely,
    "sam2_video_mask_decoder": prompted_finely,
    "sam3": boxes,
    "sam3_detr_decoder": placed_image_and_text,
    "sam3_detr_encoder": image_and_text,
    "sam3_geometry_encoder": boxes,
    "sam3_lite_text": boxes,
    "sam3_lite_text_detr_decoder": placed_image_and_text,
    "sam3_lite_text_detr_encoder": image_and_text,
    "sam3_lite_text_geometry_encoder": boxes,
    "sam3_lite_text_mask_decoder": queries_and_prompt,
    "sam3_mask_decoder": queries_and_prompt,
    "sam3_tracker": prompted_finely,
    "sam3_tracker_mask_decoder": prompted_finely,
    "sam3_tracker_video_mask_decoder": prompted_finely,
    "sam_hq": lambda config: prompted(config, hq_token_only=False),
    "sam_hq_mask_decoder": lambda config: prompted(config, hq_token_only=False),
    "sam_mask_decoder": prompted,
    "tvp": lambda config: {"hidden_states": torch.randn(2, 13, config.hidden_size)},
}

HIERA = {
    "blocks_per_stage": [1, 1, 1, 1], "embed_dim_per_stage": [16, 32, 64, 128], "hidden_size": 16,
    "num_attention_heads": 1, "num_attention_heads_per_stage": [1, 2, 4, 8],
}
CONFIGS = {
    "sam2_hiera_det_model": HIERA,
    "sam2_vision_model": {"backbone_channel_list": [128, 64, 32, 16]},
    "sam3_detr_decoder": {"num_queries": 7},
    "sam3_lite_text_detr_decoder": {"num_queries": 7},
    "sam3_lite_text_mask_decoder": {"num_upsampling_stages": 2},
    "sam3_mask_decoder": {"num_upsampling_stages": 2},
}
