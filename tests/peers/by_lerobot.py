"""LeRobot's own code: GR00T N1.5, made tiny and saved by its writer; and what its processors make of pi0.5's states.

    python by_lerobot.py gr00t FOLDER        # given.safetensors in; gr00t/ and answers.safetensors out
    python by_lerobot.py processors FOLDER   # the processors' files, and prompts and numbers that they make

Runs where lerobot is installed, and imports nothing of rlinf.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from imported import bare, stand_in
from safetensors.torch import load_file, save_file

stand_in("draccus", "peft", "torchvision", "gymnasium", "datasets", "cv2", "av", "deepdiff", "serial", "jsonlines",
         "imageio", "wandb", "lerobot.policies.groot.configuration_groot",
         "lerobot.policies.pi05.configuration_pi05",
         "lerobot.policies.pretrained", "lerobot.policies.rtc", "lerobot.configs.policies")  # fmt: skip
bare("lerobot", "lerobot.policies", "lerobot.policies.groot", "lerobot.policies.pi05", "lerobot.processor",
     "lerobot.datasets", "lerobot.utils", "lerobot.configs", "lerobot.policies.groot.eagle2_hg_model")  # fmt: skip


def gr00t(folder: Path) -> None:
    """Make it, save it, and ask for actions and the loss."""
    from lerobot.policies.groot import groot_n1
    from lerobot.policies.groot.action_head import flow_matching_action_head as head
    from lerobot.policies.groot.eagle2_hg_model.configuration_eagle2_5_vl import Eagle25VLConfig
    from lerobot.policies.groot.eagle2_hg_model.modeling_eagle2_5_vl import Eagle25VLForConditionalGeneration
    from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM
    from transformers.models.siglip.modeling_siglip import SiglipVisionModel

    given, about = load_file(folder / "given.safetensors"), json.loads((folder / "given.json").read_text())

    def eagle(config: Any, **_: Any) -> Any:
        parts = SiglipVisionModel(config.vision_config), Qwen3ForCausalLM(config.text_config)
        return Eagle25VLForConditionalGeneration(config, *parts)

    sizes = Eagle25VLConfig(
        **about["eagle"], select_layer=-1, use_pixel_shuffle=False, mlp_connector_layers=1, _attn_implementation="eager"
    )
    sizes.image_token_index = about["eagle"]["image_token_index"]
    sizes.select_layer, sizes.use_pixel_shuffle, sizes.mlp_connector_layers = -1, False, 1
    groot_n1.ensure_eagle_cache_ready = lambda *_: None
    groot_n1.AutoConfig = SimpleNamespace(from_pretrained=lambda *_, **__: sizes)
    groot_n1.AutoModel = SimpleNamespace(from_config=eagle)
    groot_n1.tree = SimpleNamespace(
        map_structure=lambda change, rows: type(rows)({key: change(each) for key, each in rows.items()})
    )
    torch.manual_seed(5)
    numbers = {"action_dim": 8, "action_horizon": 6, "compute_dtype": "float32"}
    backbone = {**about["model"]["backbone_cfg"], "project_to_dim": None}
    config = groot_n1.GR00TN15Config(
        backbone_cfg=backbone, action_head_cfg=about["model"]["action_head_cfg"], hidden_size=48, **numbers
    )
    model = groot_n1.GR00TN15(config, "").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder / "gr00t")

    # in batches of one, as robots act: without padding
    chains, losses = [], []
    for row, tokens in enumerate(given["text"]):
        tokens = tokens[tokens >= 0][None]
        one = {
            "eagle_input_ids": tokens, "eagle_attention_mask": torch.ones_like(tokens),
            "eagle_pixel_values": given["pixels"][row], "eagle_image_sizes": None,
            "state": given["state"][row][None, None], "embodiment_id": torch.tensor([31]),
        }  # fmt: skip
        noise, time = given["noise"][row : row + 1], given["time"][row : row + 1]
        head.torch = _With(randn=lambda *_, noise=noise, **__: noise)
        model.action_head.sample_time = lambda *_, time=time, **__: 1 - time  # its own runs from noise to actions
        chains.append(model.get_action(dict(one))["action_pred"])
        mask = torch.zeros(1, 6, 8, dtype=torch.bool)
        mask[..., :7] = True
        with torch.no_grad():
            learned = {**one, "action": given["wanted"][row : row + 1], "action_mask": mask}
            losses.append(model(learned)["loss"])
    answers = {"chain": torch.cat(chains).contiguous(), "losses": torch.stack(losses)}
    save_file(answers, folder / "answers.safetensors")


class _With:
    """torch, but for some of its functions."""

    def __init__(self, **changed: Any):
        self.__dict__.update(changed)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def processors(folder: Path) -> None:
    """Save the steps that normalise, and write states into prompts, by quantiles."""
    from lerobot import processor
    from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
    from lerobot.processor import core, normalize_processor, pipeline
    from lerobot.processor.core import TransitionKey
    from lerobot.processor.normalize_processor import NormalizerProcessorStep, UnnormalizerProcessorStep
    from lerobot.processor.pipeline import PolicyProcessorPipeline

    unused = ("AddBatchDimension", "Device", "RenameObservations", "Tokenizer")
    for module in (core, normalize_processor, pipeline):
        processor.__dict__.update({name: each for name, each in vars(module).items() if name[0].isupper()})
    processor.__dict__.update({f"{name}ProcessorStep": None for name in unused})
    from lerobot.policies.groot import processor_groot
    from lerobot.policies.pi05 import processor_pi05

    given, about = load_file(folder / "given.safetensors"), json.loads((folder / "given.json").read_text())
    features = {
        "observation.state": PolicyFeature(FeatureType.STATE, (8,)), "action": PolicyFeature(FeatureType.ACTION, (7,))
    }  # fmt: skip
    kinds = {FeatureType.STATE: NormalizationMode.QUANTILES, FeatureType.ACTION: NormalizationMode.QUANTILES}
    numbers = {
        feature: {name: torch.tensor(row) for name, row in about["statistics"][part].items()}
        for feature, part in (("observation.state", "state"), ("action", "actions"))
    }
    steps = {
        "policy_preprocessor": NormalizerProcessorStep(features=features, norm_map=kinds, stats=numbers),
        "policy_postprocessor": UnnormalizerProcessorStep(features=features, norm_map=kinds, stats=numbers),
    }
    for name in ("lerobot", "groot"):
        (folder / name).mkdir()
    for name, step in steps.items():
        PolicyProcessorPipeline(steps=[step], name=name)._save_pretrained(folder / "lerobot")
    state = steps["policy_preprocessor"]._apply_transform(given["state"], "observation.state", FeatureType.STATE)
    writer = processor_pi05.Pi05PrepareStateTokenizerProcessorStep(max_state_dim=32)
    rows = {
        TransitionKey.OBSERVATION: {"observation.state": state},
        TransitionKey.COMPLEMENTARY_DATA: {"task": about["texts"]},
    }
    (folder / "prompts.json").write_text(json.dumps(writer(rows)[TransitionKey.COMPLEMENTARY_DATA]["task"]))
    actions = steps["policy_postprocessor"]._normalize_action(given["actions"], inverse=True)
    answers = {"state": state, "actions": actions.contiguous()}

    # GR00T's: states by least and greatest, padded; and the text that its chat template is given
    ends = {part: {end: row[name] for end, name in (("min", "q01"), ("max", "q99"))} for part, row in numbers.items()}
    packing = processor_groot.GrootPackInputsStep(stats=ends, embodiment_tag="so100")
    unpacking = processor_groot.GrootActionUnpackUnnormalizeStep(stats=ends, env_action_dim=7)
    for name, step in (("policy_preprocessor", packing), ("policy_postprocessor", unpacking)):
        PolicyProcessorPipeline(steps=[step], name=name)._save_pretrained(folder / "groot")
    packed = packing(
        {
            TransitionKey.OBSERVATION: {"observation.state": given["state"], "observation.images.a": given["rgb"]},
            TransitionKey.COMPLEMENTARY_DATA: {"task": about["texts"][0]},
        }
    )
    answers["groot_robot"] = packed[TransitionKey.COMPLEMENTARY_DATA]["embodiment_id"].clone()
    answers["groot_state"] = packed[TransitionKey.OBSERVATION]["state"].contiguous()
    answers["groot_actions"] = unpacking({TransitionKey.ACTION: given["actions"][:, 0]})[TransitionKey.ACTION]
    encoding = processor_groot.GrootEagleEncodeStep()
    encoding._proc = SimpleNamespace(
        apply_chat_template=lambda chat, **_: chat[0]["content"][-1]["text"],
        process_vision_info=lambda chat: (None, None),
    )
    chats = encoding(packed)[TransitionKey.COMPLEMENTARY_DATA]["eagle_content"]
    (folder / "chats.json").write_text(json.dumps([chat["text_list"][0] for chat in chats]))
    save_file(answers, folder / "answers.safetensors")


if __name__ == "__main__":
    {"gr00t": gr00t, "processors": processors}[sys.argv[1]](Path(sys.argv[2]))
