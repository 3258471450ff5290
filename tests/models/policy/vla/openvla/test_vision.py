"""The encoders: equal to transformers' models of the same weights, and to the published names and shapes."""

import pytest
import torch
from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel, SiglipVisionConfig, SiglipVisionModel

from rlinf.models.policy.published import matches
from rlinf.models.policy.vla.openvla import Vit, VitSizes, sizes_of

DINO = VitSizes(width=32, depth=3, heads=4, mlp=64, image=42, registers=4)
SIGLIP = VitSizes(width=36, depth=3, heads=3, mlp=50, image=42)


def random_vit(sizes):
    vit = Vit(sizes)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in vit.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.2)
    return vit


def of_block(vit, number, names):
    """Weights of a block under the names of transformers, `qkv` taken apart."""
    found = {}
    for name, tensor in vit.blocks[number].state_dict().items():
        part, _, kind = name.rpartition(".")
        if part == "attn.qkv":
            for which, each in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                found[f"{names[which]}.{kind}"] = each
        elif kind == "scale_factor":
            found[f"{names[part]}.lambda1"] = tensor
        else:
            found[f"{names[part]}.{kind}"] = tensor
    return found


def test_dino_with_registers_is_transformers_model():
    vit = random_vit(DINO)
    config = Dinov2WithRegistersConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, mlp_ratio=2, image_size=42, patch_size=14,
        num_register_tokens=4, hidden_act="gelu", layer_norm_eps=1e-6,
    )  # fmt: skip
    other = Dinov2WithRegistersModel(config).eval()
    names = {"norm1": "norm1", "norm2": "norm2", "attn.proj": "attention.o_proj", "mlp.fc1": "mlp.fc1"}
    names |= {"mlp.fc2": "mlp.fc2", "ls1": "layer_scale1", "ls2": "layer_scale2"}
    names |= {which: f"attention.{which[0]}_proj" for which in ("query", "key", "value")}
    state = {
        "embeddings.cls_token": vit.cls_token,
        "embeddings.mask_token": torch.zeros(1, 32),
        "embeddings.register_tokens": vit.reg_token,
        "embeddings.position_embeddings": torch.cat([torch.zeros(1, 1, 32), vit.pos_embed], 1),
        "embeddings.patch_embeddings.projection.weight": vit.patch_embed.proj.weight,
        "embeddings.patch_embeddings.projection.bias": vit.patch_embed.proj.bias,
        "layernorm.weight": vit.norm.weight,
        "layernorm.bias": vit.norm.bias,
    }
    for number in range(3):
        state |= {f"encoder.layer.{number}.{name}": each for name, each in of_block(vit, number, names).items()}
    assert other.load_state_dict(state, strict=True)
    agree(vit, other, first=5)


def test_siglip_is_transformers_model_with_the_exact_gelu():
    vit = random_vit(SIGLIP)
    config = SiglipVisionConfig(
        hidden_size=36, num_hidden_layers=3, num_attention_heads=3, intermediate_size=50, image_size=42, patch_size=14,
        hidden_act="gelu", layer_norm_eps=1e-6, vision_use_head=False,
    )  # fmt: skip
    other = SiglipVisionModel(config).eval()
    names = {"norm1": "layer_norm1", "norm2": "layer_norm2", "attn.proj": "self_attn.out_proj"}
    names |= {"mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}
    names |= {which: f"self_attn.{which[0]}_proj" for which in ("query", "key", "value")}
    state = {
        "embeddings.position_embedding.weight": vit.pos_embed[0],
        "embeddings.patch_embedding.weight": vit.patch_embed.proj.weight,
        "embeddings.patch_embedding.bias": vit.patch_embed.proj.bias,
        "post_layernorm.weight": vit.norm.weight,
        "post_layernorm.bias": vit.norm.bias,
    }
    for number in range(3):
        state |= {f"encoder.layers.{number}.{name}": each for name, each in of_block(vit, number, names).items()}
    assert other.load_state_dict(state, strict=True)
    agree(vit, other, first=0)


def agree(vit, other, first):
    pixels = torch.randn(2, 3, 42, 42, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = other(pixel_values=pixels, output_hidden_states=True).hidden_states[2][:, first:]
        found = vit(pixels)
    assert found.shape == (2, 9, vit.sizes.width)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert found.std() > 0.1


def test_what_nothing_reads_is_there_and_is_told():
    vit = random_vit(SIGLIP)
    vit(torch.randn(1, 3, 42, 42)).sum().backward()
    still = {name for name, each in vit.named_parameters() if each.grad is None}
    assert still == {name for name, _ in vit.named_parameters() if matches(name, vit.unread)}
    assert {name.split(".")[0] for name in still} == {"blocks", "norm", "attn_pool"}
    assert {name.split(".")[1] for name in still if name.startswith("blocks")} == {"2"}


def test_encoders_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"names vit_huge.*vit_large_patch14"):
        sizes_of(["vit_huge"])
    with pytest.raises(ValueError, match=r"whole patches"):
        sizes_of(["vit_so400m_patch14_siglip_224"], [{"image": 30}])
