"""RoBERTa: its encoder is replaced, in every model that has one."""

from __future__ import annotations

from smdistributed.modelparallel.torch.nn.huggingface.encoder import encoder, translations

translate_state_dict_to_hf_roberta, translate_hf_state_dict_to_smdistributed_roberta = translations()
translate_state_dict_to_hf = translate_state_dict_to_hf_roberta
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed = (
    translate_hf_state_dict_to_smdistributed_roberta
)

#: By the name of a class of transformers, how it is replaced.
REGISTRATIONS = {"RobertaEncoder": encoder()}
