"""How a checkpoint's scheme is found, and what happens where its description and its tensors disagree."""

import pytest

from quire.errors import CheckpointError, UnsupportedModelError
from quire.quantization.schemes.registry import scheme_of

UP = "model.layers.0.mlp.up_proj"
FP8 = {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.9.mlp.up_proj"]}}


def test_no_description():
    assert scheme_of({}) is None
    assert scheme_of({"quantization_config": None}, dtypes={f"{UP}.weight": "BF16", "a.b": "I64"}) is None
    for tensor, dtype in (("weight", "F8_E4M3"), ("weight", "I8"), ("qweight", "I32"), ("weight_packed", "I32")):
        with pytest.raises(CheckpointError, match=rf"{UP} is stored in few bits \({tensor} {dtype}\), but config.json"):
            scheme_of({}, dtypes={f"{UP}.{tensor}": dtype})


@pytest.mark.parametrize("method", ["bitsandbytes", "torchao", "quark", "gemma", "hqq", "aqlm"])
def test_methods_without_a_reader_are_refused_by_name(method):
    with pytest.raises(UnsupportedModelError, match=rf"'{method}', which is not read: \w+"):
        scheme_of({"quantization_config": {"quant_method": method}})


def test_unknown_methods_are_refused_by_name():
    with pytest.raises(UnsupportedModelError, match="'new', which is not known; known: .*awq"):
        scheme_of({"quantization_config": {"quant_method": "new"}})
    with pytest.raises(UnsupportedModelError, match="bitsandbytes"):
        scheme_of({"quantization_config": {"load_in_4bit": True}})
    with pytest.raises(CheckpointError, match="no quant_method"):
        scheme_of({"quantization_config": {"bits": 4}})
    with pytest.raises(CheckpointError, match="an object is needed"):
        scheme_of({"quantization_config": "fp8"})


def test_a_checkpoint_cannot_name_code_to_import():
    with pytest.raises(UnsupportedModelError, match="not known"):
        scheme_of({"quantization_config": {"quant_method": "os.system"}})


def test_places_of_a_description():
    assert scheme_of({"text_config": FP8}).name == "fp8"
    assert scheme_of({"compression_config": {"config_groups": {}}}).name == "compressed-tensors"
    assert scheme_of({"quantization_config": {"quant_algo": "FP8"}}).name == "modelopt"
    files = {"quantize_config.json": {"bits": 4, "group_size": 128}}
    assert scheme_of({}, files.get).name == "gptq"
    assert scheme_of(FP8, files.get).name == "fp8"


def test_a_module_stored_in_16_bits_is_read_so():
    found = scheme_of(FP8, dtypes={f"{UP}.weight": "BF16"})
    assert found.format_of(UP) is None
    assert found.format_of(UP) is None
    assert len(found.disagreements) == 1
    assert found.disagreements[0].startswith(f"{UP} is fp8, one scale")


def test_a_module_stored_in_few_bits_that_is_left_out_is_refused():
    module = "model.layers.9.mlp.up_proj"
    found = scheme_of(FP8, dtypes={f"{module}.weight": "F8_E4M3", f"{module}.weight_scale": "F32"})
    with pytest.raises(CheckpointError, match=rf"{module} is stored in few bits \(weight F8_E4M3, weight_scale F32\)"):
        found.format_of(module)


def test_weights_with_scales_that_were_never_compressed_are_refused():
    found = scheme_of(FP8, dtypes={f"{UP}.weight": "BF16", f"{UP}.weight_scale": "F32"})
    with pytest.raises(CheckpointError, match=f"{UP}.weight is stored as BF16, but {UP}.weight_scale"):
        found.format_of(UP)


def test_the_head_is_quantized_if_its_tensors_are():
    assert scheme_of(FP8).format_of("lm_head") is None
    tied = scheme_of(FP8, dtypes={f"{UP}.weight": "F8_E4M3"})
    assert tied.format_of("lm_head") is None
    plain = scheme_of(FP8, dtypes={"lm_head.weight": "BF16"})
    assert plain.format_of("lm_head") is None and not plain.disagreements
    assert scheme_of(FP8, dtypes={"lm_head.weight": "F8_E4M3"}).format_of("lm_head") is not None


def test_names_of_a_bare_or_larger_model():
    bare = scheme_of(FP8, dtypes={"layers.0.mlp.up_proj.weight": "BF16"})
    assert bare.format_of(UP) is None
    larger = scheme_of(FP8, dtypes={f"language_model.{UP}.weight": "BF16"})
    assert larger.format_of(UP) is None
    assert larger.format_of("model.layers.1.mlp.up_proj") is not None


def test_scales_of_the_kv_cache_belong_to_no_matrix():
    found = scheme_of(FP8)
    attention = "model.layers.0.self_attn"
    for name in ("k_scale", "v_scale", "q_scale", "k_proj.k_scale", "v_proj.output_scale", "kv_scale"):
        assert found.ignores(f"{attention}.{name}")
    for name in ("q_proj.weight_scale", "k_proj.input_scale", "q_proj.output_scale", "o_proj.weight"):
        assert not found.ignores(f"{attention}.{name}")
