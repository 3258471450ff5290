"""Stand-ins for what SAPIEN cannot describe without a renderer."""

import copy
import pickle

import pytest

from rlinf.envs import maniskill
from rlinf.envs.maniskill import _Description


def test_a_stand_in_takes_everything_and_knows_what_it_was_told():
    material = _Description(1, base_color=[1, 0, 0, 1])
    assert material.base_color == [1, 0, 0, 1]
    assert material.roughness is None
    assert material.set_metallic(0.5) is None
    material.specular = 0.3
    assert material.specular == 0.3


def test_a_stand_in_is_copied_and_pickled():
    material = _Description(base_color=2)
    assert copy.deepcopy(material).base_color == pickle.loads(pickle.dumps(material)).base_color == 2


def test_descriptions_are_replaced_wherever_they_are_known():
    pytest.importorskip("sapien")
    if maniskill.can_draw():
        pytest.skip("this machine can draw, and goes on with the real ones")
    import sapien
    import sapien.wrapper.urdf_loader

    maniskill.stand_in()
    maniskill.stand_in()
    for module in (sapien.render, sapien.pysapien.render, sapien.wrapper.urdf_loader):
        assert issubclass(module.RenderMaterial, _Description)
    assert isinstance(sapien.render.RenderMaterial(base_color=[0, 0, 0, 1]), _Description)
    assert not maniskill.can_draw()
