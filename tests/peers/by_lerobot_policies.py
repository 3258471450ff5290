"""LeRobot's whole policies, with their configurations and processors: made tiny, saved, loaded, and asked.

    python by_lerobot_policies.py make act FOLDER          # given.safetensors in; FOLDER/act and its answers out
    python by_lerobot_policies.py load act FOLDER NAME …   # FOLDER/NAME in; its answers out, FOLDER/NAME.safetensors

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

# torchvision's own operators need another build of torch; a ResNet has none of them
stand_in("torchvision._meta_registrations", "torchvision.io", "peft", "gymnasium", "datasets", "cv2", "av", "deepdiff",
         "serial", "jsonlines", "imageio", "wandb", "accelerate", "lerobot.configs.train",
         "lerobot.teleoperators", "lerobot.robots", "lerobot.datasets", "lerobot.envs",
         "lerobot.processor.hil_processor")  # fmt: skip
bare(
    "lerobot",
    "lerobot.policies",
    "lerobot.policies.act",
    "lerobot.policies.diffusion",
    "lerobot.policies.smolvla",
    "lerobot.policies.wall_x",
    "lerobot.policies.pi0_fast",
    "lerobot.policies.rtc",
)
from lerobot.configs.types import FeatureType, PolicyFeature  # noqa: E402
from lerobot.processor.converters import policy_action_to_transition, transition_to_policy_action  # noqa: E402
from lerobot.processor.pipeline import PolicyProcessorPipeline  # noqa: E402


def moved(model: torch.nn.Module) -> torch.nn.Module:
    """A model none of whose tensors is left at its first values."""
    torch.manual_seed(7)
    with torch.no_grad():
        for name, each in model.state_dict().items():
            if each.is_floating_point() and "pos_enc" not in name:
                each.mul_(1 + 0.1 * torch.rand_like(each)).add_(0.05 * torch.rand_like(each) * (each.ndim == 1))
    return model


def batch_of(given: dict[str, torch.Tensor], config: Any) -> dict[str, Any]:
    """A batch as lerobot's data sets give it: of policies that see several observations, with an axis for them."""
    frames = config.n_obs_steps
    names, own = list(config.image_features), config.robot_state_feature.shape[0] if config.robot_state_feature else 0
    pictures = (given["rgb"].float() / 255).unflatten(3, (frames, -1, 3)).permute(4, 0, 3, 5, 1, 2)
    states = given["state"].unflatten(1, (frames, -1))
    batch = {name: pictures[number] for number, name in enumerate(names)}
    batch |= {"observation.state": states[..., :own], "observation.environment_state": states[..., own:]}
    if own == states.shape[2]:
        del batch["observation.environment_state"]
    if config.type != "diffusion":
        batch = {name: each[:, 0] for name, each in batch.items()}
    return batch | {"action": given["actions"], "action_is_pad": given["pads"].bool()}


def features(about: dict[str, Any]) -> dict[str, Any]:
    def parts(of: str) -> dict[str, PolicyFeature]:
        return {name: PolicyFeature(FeatureType(kind), tuple(shape)) for name, (kind, shape) in about[of].items()}

    return {"input_features": parts("inputs"), "output_features": parts("outputs")}


def around(directory: Path) -> tuple[Any, Any]:
    """The pipelines that lie in a directory."""
    about, overrides = json.loads((directory / "config.json").read_text()), {}
    if about["type"] == "pi0_fast":  # a step saves neither
        own = {"paligemma_tokenizer_name": about["text_tokenizer_name"], "fast_skip_tokens": about["fast_skip_tokens"]}
        overrides["action_tokenizer_processor"] = own
    before = PolicyProcessorPipeline.from_pretrained(
        directory, config_filename="policy_preprocessor.json", overrides=overrides
    )
    after = PolicyProcessorPipeline.from_pretrained(
        directory, config_filename="policy_postprocessor.json", to_transition=policy_action_to_transition,
        to_output=transition_to_policy_action,
    )  # fmt: skip
    return before, after


def parts_of(kind: str, folder: Path) -> tuple[Any, Any, Any]:
    """Configuration, class, and maker of processors."""
    if kind == "act":
        from lerobot.policies.act import modeling_act
        from lerobot.policies.act.processor_act import make_act_pre_post_processors

        return modeling_act.ACTConfig, modeling_act.ACTPolicy, make_act_pre_post_processors
    if kind == "diffusion":
        from lerobot.policies.diffusion import modeling_diffusion
        from lerobot.policies.diffusion.processor_diffusion import make_diffusion_pre_post_processors

        makers = modeling_diffusion.DiffusionPolicy, make_diffusion_pre_post_processors
        return modeling_diffusion.DiffusionConfig, *makers
    if kind == "wall_x":
        return wall_x(folder)
    if kind == "pi0_fast":
        return parts_of_pi0_fast(folder)
    from lerobot.policies.smolvla import modeling_smolvla, processor_smolvla, smolvlm_with_expert
    from transformers.models.smolvlm import modeling_smolvlm as smolvlm

    # in float32, transformers 4.57 rounds the places of patches to those before them, unlike in bfloat16, in which
    # SmolVLA is trained, and unlike transformers 5
    smolvlm.SmolVLMVisionEmbeddings.forward = lambda self, pixel_values, patch_attention_mask: (
        self.patch_embedding(pixel_values).flatten(2).transpose(1, 2) + self.position_embedding.weight
    )
    tokenizer = SimpleNamespace(fake_image_token_id=0, global_image_token_id=0)  # of no use where none are added
    smolvlm_with_expert.AutoProcessor = SimpleNamespace(from_pretrained=lambda *_: SimpleNamespace(tokenizer=tokenizer))
    makers = modeling_smolvla.SmolVLAPolicy, processor_smolvla.make_smolvla_pre_post_processors
    return modeling_smolvla.SmolVLAConfig, *makers


def wall_x(folder: Path) -> tuple[Any, Any, Any]:
    """WALL-OSS in float32: acting in anything but bfloat16 fails, by a cast of the state to that."""
    from lerobot.policies.wall_x import modeling_wall_x, processor_wall_x
    from transformers import PreTrainedTokenizerFast
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    words = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), pad_token="<|endoftext|>")
    processor = SimpleNamespace(tokenizer=words, image_processor=Qwen2VLImageProcessor())
    modeling_wall_x.AutoProcessor = SimpleNamespace(from_pretrained=lambda *_, **__: processor)
    modeling_wall_x.torch = _With(bfloat16=torch.float32)
    makers = modeling_wall_x.WallXPolicy, processor_wall_x.make_wall_x_pre_post_processors
    return modeling_wall_x.WallXConfig, *makers


def drawn_by_wall_x(given: dict[str, torch.Tensor]) -> None:
    """Have it draw what was given."""
    from lerobot.policies.wall_x import modeling_wall_x

    noise = {"randn": lambda *_, **__: given["noise"], "randn_like": lambda *_, **__: given["noise"]}
    modeling_wall_x.torch = _With(bfloat16=torch.float32, **noise)
    modeling_wall_x.ActionHead.sample_time = lambda *_: 1 - given["time"]


class Fast:
    """What stands in the place of the code that lies beside FAST's tokens on a hub: by scipy, of the files alone."""

    def __init__(self, directory: str, **_: Any):
        from transformers import PreTrainedTokenizerFast

        about = json.loads((Path(directory) / "processor_config.json").read_text())
        self.scale, self.min_token = about["scale"], about["min_token"]
        self.bpe_tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(Path(directory) / "tokenizer.json"), clean_up_tokenization_spaces=False
        )

    def __call__(self, chunks: torch.Tensor) -> list[list[int]]:
        from scipy.fft import dct

        rounded = (dct(chunks.double().numpy(), axis=1, norm="ortho") * self.scale).round().astype(int)
        texts = ["".join(chr(number - self.min_token) for number in row.ravel()) for row in rounded]
        return [self.bpe_tokenizer(text)["input_ids"] for text in texts]


def parts_of_pi0_fast(folder: Path) -> tuple[Any, Any, Any]:
    """See `parts_of`; by openpi's transformers, which lerobot's lines are written for, at tiny sizes."""
    import transformers
    from lerobot.processor import tokenizer_processor

    transformers.AutoProcessor = tokenizer_processor.AutoProcessor = SimpleNamespace(from_pretrained=Fast)
    from lerobot.policies.pi0_fast import modeling_pi0_fast, processor_pi0_fast

    about = json.loads((folder / "given.json").read_text())
    for kind, sizes in (("SiglipVisionConfig", about["vision"]), ("GemmaConfig", about["words"])):
        config = getattr(transformers, kind)
        plain = config.__setattr__  # keeps these sizes where lerobot sets those of the true model
        config.__setattr__ = lambda self, name, value, plain=plain, sizes=sizes: plain(
            self, name, sizes.get(name, value)
        )

    def paligemma() -> Any:
        config = transformers.PaliGemmaConfig()
        config.vision_config = transformers.SiglipVisionConfig(**about["vision"])
        config.text_config = transformers.GemmaConfig()
        return config

    modeling_pi0_fast.CONFIG_MAPPING = {"paligemma": paligemma}
    modeling_pi0_fast.get_gemma_config = lambda _: SimpleNamespace(**about["stack"])
    makers = modeling_pi0_fast.PI0FastPolicy, processor_pi0_fast.make_pi0_fast_pre_post_processors
    return modeling_pi0_fast.PI0FastConfig, *makers


def taught(policy: Any, directory: Path, given: dict[str, torch.Tensor], texts: list[str]) -> None:
    """Have it learn what is demonstrated, by its own loss, so that it says actions rather than any words."""
    batch = around(directory)[0]({**batch_of(given, policy.config), "task": texts})
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    for _ in range(80):
        optimizer.zero_grad()
        policy.forward(batch)[0].backward()
        optimizer.step()


def answered(policy: Any, directory: Path, given: dict[str, torch.Tensor], texts: list[str]) -> dict[str, torch.Tensor]:
    """Actions in the robot's units, and the loss of demonstrated ones."""
    before, after = around(directory)
    batch = before({**batch_of(given, policy.config), "task": texts})
    kind, flows = policy.config.type, {"noise": given["noise"]} if "noise" in given else {}
    if kind == "wall_x":
        drawn_by_wall_x(given)
        flows = {}
    if kind == "diffusion":
        chunk = after(denoised(policy, batch, given))
        flows = {}
    else:
        chunk = after(policy.predict_action_chunk({**batch}, **flows))
    if kind == "act":
        from lerobot.policies.act import modeling_act

        modeling_act.torch = _With(randn_like=lambda *_: given["latent"])
        policy.train()
    elif kind == "smolvla":
        flows["time"] = given["time"]
    with torch.no_grad():
        loss, _ = policy.forward(batch, **flows)
    return {"actions": chunk.contiguous(), "loss": loss}


def denoised(policy: Any, batch: dict[str, Any], given: dict[str, torch.Tensor]) -> torch.Tensor:
    """Actions of Diffusion Policy, whose queues are filled with what was seen one after the other."""
    from diffusers.schedulers import scheduling_ddpm
    from lerobot.policies.diffusion import modeling_diffusion
    from lerobot.policies.utils import populate_queues

    draws = iter(given["draws"].unbind(1))
    scheduling_ddpm.randn_tensor = lambda *_, **__: next(draws)
    seen = {name: each for name, each in batch.items() if str(name).startswith("observation.")}
    if names := list(policy.config.image_features):
        seen["observation.images"] = torch.stack([seen.pop(name) for name in names], 2)
    policy.reset()
    for number in range(policy.config.n_obs_steps):
        now = {name: each[:, number] for name, each in seen.items()}
        policy._queues = populate_queues(policy._queues, now)
    chunk = policy.predict_action_chunk(now, noise=given["noise"])
    modeling_diffusion.torch = _With(randn=lambda *_, **__: given["noise"], randint=lambda *_, **__: given["steps"])
    return chunk


class _With:
    """torch, but for some of its functions."""

    def __init__(self, **changed: Any):
        self.__dict__.update(changed)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def make(kind: str, folder: Path) -> None:
    given, about = load_file(folder / "given.safetensors"), json.loads((folder / "given.json").read_text())
    config, policy, processors = parts_of(kind, folder)
    sizes = dict(about["sizes"])
    if kind == "pi0_fast":
        sizes |= {"text_tokenizer_name": str(folder / "words"), "action_tokenizer_name": str(folder / "fast")}
    if kind == "smolvla":
        from transformers import SmolVLMConfig

        SmolVLMConfig(**about["vlm"]).save_pretrained(folder / "vlm")
        sizes |= {"vlm_model_name": str(folder / "vlm"), "load_vlm_weights": False}
        (folder / "vlm" / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
        words = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>"}
        (folder / "vlm" / "tokenizer_config.json").write_text(json.dumps(words))
    if kind == "wall_x":
        (folder / "qwen").mkdir()
        (folder / "qwen" / "config.json").write_text(json.dumps(about["network"]))
        sizes |= {"pretrained_name_or_path": str(folder / "qwen")}
    torch.manual_seed(5)
    mine = moved(policy(config(**features(about), **sizes, device="cpu"))).eval()
    statistics = {
        feature: {name: torch.tensor(row) for name, row in each.items()} for feature, each in about["numbers"].items()
    }
    for each in processors(mine.config, statistics):
        each.save_pretrained(folder / kind)
    if kind == "pi0_fast":
        mine.config.save_pretrained(folder / kind)
        taught(mine, folder / kind, given, about["texts"])
    mine.save_pretrained(folder / kind)
    save_file(answered(mine, folder / kind, given, about["texts"]), folder / "answers.safetensors")


def load(kind: str, folder: Path, *names: str) -> None:
    given, about = load_file(folder / "given.safetensors"), json.loads((folder / "given.json").read_text())
    for name in names:
        _, policy, _ = parts_of(kind, folder)
        mine = policy.from_pretrained(folder / name, strict=True)
        save_file(answered(mine, folder / name, given, about["texts"]), folder / f"{name}.safetensors")


if __name__ == "__main__":
    {"make": make, "load": load}[sys.argv[1]](sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
