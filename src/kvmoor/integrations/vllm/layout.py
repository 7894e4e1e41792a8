"""From vLLM's description of its KV caches to a `BlockLayout`."""

from collections.abc import Sequence
from typing import Any

from kvmoor.block_layout import BlockLayout, GroupLayout, TensorPages
from kvmoor.errors import LayoutError


def describe_kv_caches(kv_caches: Any, *, tokens_per_block: Sequence[int], content: str) -> BlockLayout:
    """Describe vLLM's ``CanonicalKVCaches``: one group for each that is offloaded, in vLLM's order.

    Its tensors are int8 ``[num_blocks, page bytes]`` whose stride may exceed the page. A tensor that several layers of
    a group share is copied once; one that several groups share belongs to each of them. Of padded pages only the part
    in front of the padding is copied. `content` says what the bytes mean; `tokens_per_block` are those of a device
    block in each group. Raises `LayoutError` for what cannot be described.
    """
    groups = kv_caches.group_data_refs
    if len(groups) != len(tokens_per_block):
        raise LayoutError(f"vLLM registered {len(groups)} groups of KV caches and configured {len(tokens_per_block)}")
    tensors = [each.tensor for each in kv_caches.tensors]
    on_host = {tensor.device.type == "cpu" for tensor in tensors}
    if len(on_host) > 1:
        raise LayoutError("some KV caches lie in host memory and some on a GPU: kvmoor copies from one place")
    return BlockLayout(
        tuple(_group(refs, tensors, tokens, content) for refs, tokens in zip(groups, tokens_per_block, strict=True)),
        on_host=on_host == {True},
    )


def _group(refs: Sequence[Any], tensors: Sequence[Any], tokens_per_block: int, content: str) -> GroupLayout:
    page_nbytes: dict[int, int] = {}
    for ref in refs:
        page_nbytes[ref.tensor_idx] = max(ref.page_size_bytes, page_nbytes.get(ref.tensor_idx, 0))
    pages = tuple(
        TensorPages(
            base=tensors[number].data_ptr(),
            num_blocks=tensors[number].shape[0],
            block_stride=tensors[number].stride(0) * tensors[number].element_size(),
            page_nbytes=nbytes,
            content=content,
        )
        for number, nbytes in page_nbytes.items()
    )
    return GroupLayout(pages, tokens_per_block, tensor_owners=tuple(tensors[number] for number in page_nbytes))
