"""njt: batches of variable-length sequences as ordinary tensors, with no padding."""

from njt import ops  # fills the operator tables
from njt import transforms as transforms
from njt.attention import multihead, sdpa
from njt.bert_padding import pad_input, unpad_input
from njt.construct import (
    as_nested_tensor,
    check_structure,
    from_padded,
    masked_select,
    narrow,
    nested_tensor,
    nested_tensor_from_jagged,
    to_padded_tensor,
)
from njt.drop_in import patch
from njt.exporting import export
from njt.rules.per_component import report
from njt.structure import Structure
from njt.tensor import NestedTensor

nested_tensor_from_padded = from_padded

__version__ = "0.1.0"

__all__ = [
    "NestedTensor",
    "Structure",
    "as_nested_tensor",
    "check_structure",
    "export",
    "from_padded",
    "masked_select",
    "multihead",
    "narrow",
    "nested_tensor",
    "nested_tensor_from_jagged",
    "nested_tensor_from_padded",
    "ops",
    "pad_input",
    "patch",
    "report",
    "sdpa",
    "to_padded_tensor",
    "unpad_input",
]
