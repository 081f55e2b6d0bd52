"""Settings strings, as PyTorch 2.13 reads them, and GPU names."""

import pytest

from ampmem.allocator.settings import MIB, Settings, backend_of_environment, parse_settings, settings_of_environment
from ampmem.errors import UsageError


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("", Settings()),
        ("backend:native", Settings()),
        ("max_split_size_mb:20", Settings(max_split_size=20 * MIB)),
        (" max_split_size_mb : 64 , expandable_segments:False,", Settings(max_split_size=64 * MIB)),
        ("expandable_segments:True", Settings(expandable_segments=True)),
        ("garbage_collection_threshold:0.8", Settings(garbage_collection_threshold=0.8)),
        ("per_process_memory_fraction:1", Settings(memory_fraction=1.0)),
        ("max_non_split_rounding_mb:30", Settings(max_non_split_rounding=30 * MIB)),
        (
            "max_split_size_mb:40,large_segment_size_mb:32",
            Settings(max_split_size=40 * MIB, large_segment_size=32 * MIB, max_non_split_rounding=32 * MIB),
        ),
        (
            "max_non_split_rounding_mb:12,large_segment_size_mb:11",
            Settings(large_segment_size=11 * MIB, max_non_split_rounding=12 * MIB),
        ),
        ("pinned_use_background_threads:True,pinned_num_register_threads:4", Settings()),
        ("release_lock_on_cudamalloc:True,throw_on_cudamalloc_oom:False", Settings()),
    ],
)
def test_a_settings_string(text: str, settings: Settings) -> None:
    assert parse_settings(text) == settings


@pytest.mark.parametrize(
    ("text", "divisions"),
    [
        ("4", [4] * 16),
        ("[256:1,512:2,>:4]", [1] * 9 + [2] + [4] * 6),
        ("[256:1,512:2,1024:4,>:8]", [1] * 9 + [2, 4] + [8] * 5),
        ("[64:8,>:1]", [8] * 7 + [1] * 9),
        ("[>:4]", [0] + [4] * 15),
        ("[512:2,256:1]", [2] * 8 + [1, 2] + [0] * 6),
        ("[256:2,512:0]", [2] * 9 + [0] * 7),
        ("[65536:2,131072:4]", [2] * 15 + [4]),
    ],
)
def test_roundup_divisions(text: str, divisions: list[int]) -> None:
    assert list(parse_settings(f"roundup_power2_divisions:{text}").roundup_power2_divisions) == divisions


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("backend:cudaMallocAsync", "cannot be modelled"),
        ("max_split_size_mb", "has no value"),
        ("max_split_size_mb:", "has no value"),
        ("max_split_size_mb:10", "at least 20"),
        ("max_split_size_mb:30,large_segment_size_mb:64", "at least 64"),
        ("max_split_size_mb:many", "whole number"),
        ("max_split_size_mb:²", "whole number"),
        ("max_split_size_mb:[20]", "not a list"),
        ("max_split_size_mb:64;expandable_segments:True", "separated by commas"),
        ("max_split_size_mb:64:64", "separated by commas"),
        ("max_non_split_rounding_mb:10", "at least 20"),
        ("large_segment_size_mb:10", "at least 11"),
        ("garbage_collection_threshold:1", "between 0 and 1"),
        ("garbage_collection_threshold:0", "between 0 and 1"),
        ("garbage_collection_threshold:nan", "between 0 and 1"),
        ("garbage_collection_threshold:often", "takes a number"),
        ("per_process_memory_fraction:1.5", "between 0 and 1"),
        ("expandable_segments:true", "capital letter"),
        ("graph_capture_record_stream_reuse:True", "cannot be modelled"),
        ("roundup_power2_divisions:3", "powers of two"),
        ("roundup_power2_divisions:0", "powers of two"),
        ("roundup_power2_divisions:[100:2]", "powers of two"),
        ("roundup_power2_divisions:[256:2", "closing bracket"),
        ("roundup_power2_divisions:[256,512]", "is written as"),
        ("roundup_power2_divisions:[256:2 512:4]", "is written as"),
        ("max_split_size:64", "unknown allocator option"),
    ],
)
def test_a_wrong_settings_string_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        parse_settings(text)


def test_settings_that_change_later_take_three_back_and_keep_the_others() -> None:
    first = parse_settings(
        "max_split_size_mb:64,garbage_collection_threshold:0.5,roundup_power2_divisions:4,expandable_segments:True,"
        "max_non_split_rounding_mb:40,per_process_memory_fraction:0.5"
    )
    assert parse_settings("max_split_size_mb:32", first) == Settings(
        max_split_size=32 * MIB, expandable_segments=True, max_non_split_rounding=40 * MIB, memory_fraction=0.5
    )


def test_an_environment_without_a_cache_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"^PYTORCH_NO_CUDA_MEMORY_CACHING=1 turns .*; unset PYTORCH_NO_CUDA_MEMORY_CACHING$"
    ):
        settings_of_environment({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    assert settings_of_environment({"PYTORCH_NO_CUDA_MEMORY_CACHING": "0"}) == Settings()


@pytest.mark.parametrize(
    ("text", "backend"),
    [
        ("backend:cudaMallocAsync", "cudaMallocAsync"),
        ("max_split_size_mb:64, backend : native", "native"),
        ("expandable_segments:True", "native"),
        ("backend", "native"),
    ],
)
def test_the_backend_that_an_environment_asks_for(text: str, backend: str) -> None:
    assert backend_of_environment({"PYTORCH_CUDA_ALLOC_CONF": text}) == backend


def test_the_environment_of_torch_2_13_prefers_the_older_variable() -> None:
    both = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert settings_of_environment(both) == Settings(expandable_segments=True)
    assert settings_of_environment({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}) == Settings(max_split_size=64 * MIB)
    assert settings_of_environment({}) == Settings()
