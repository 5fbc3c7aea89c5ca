"""BERT: its encoder is replaced, in every model that has one."""

from __future__ import annotations

from smdistributed.modelparallel.torch.nn.huggingface.encoder import encoder, translations

translate_state_dict_to_hf_bert, translate_hf_state_dict_to_smdistributed_bert = translations()
translate_state_dict_to_hf = translate_state_dict_to_hf_bert
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed = (
    translate_hf_state_dict_to_smdistributed_bert
)

#: By the name of a class of transformers, how it is replaced.
REGISTRATIONS = {"BertEncoder": encoder()}
