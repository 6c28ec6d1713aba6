"""An engine asserts that its layout was judged before it starts."""

import pytest
from transformers import Gemma2Config

from hybridflow.config.placement import Parallelism
from hybridflow.engines.training.fsdp.tensor_plan import check_layout


def test_any_model_is_held_in_shards_and_a_known_one_is_divided(tmp_path):
    Gemma2Config(num_hidden_layers=1).save_pretrained(tmp_path)
    check_layout(tmp_path, Parallelism(replicas=2))
    with pytest.raises(AssertionError, match="gemma2"):
        check_layout(tmp_path, Parallelism(tensor=2))
