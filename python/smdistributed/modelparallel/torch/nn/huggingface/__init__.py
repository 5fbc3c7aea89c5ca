"""Models of Hugging Face's transformers under tensor parallelism, and translations of their weights."""

from smdistributed.modelparallel.torch.nn.huggingface import bert as bert
from smdistributed.modelparallel.torch.nn.huggingface import gpt2 as gpt2
from smdistributed.modelparallel.torch.nn.huggingface import gptj as gptj
from smdistributed.modelparallel.torch.nn.huggingface import gptneo as gptneo
from smdistributed.modelparallel.torch.nn.huggingface import gptneox as gptneox
from smdistributed.modelparallel.torch.nn.huggingface import llama as llama
from smdistributed.modelparallel.torch.nn.huggingface import mistral as mistral
from smdistributed.modelparallel.torch.nn.huggingface import mixtral as mixtral
from smdistributed.modelparallel.torch.nn.huggingface import qwen2 as qwen2
from smdistributed.modelparallel.torch.nn.huggingface import roberta as roberta
from smdistributed.modelparallel.torch.nn.huggingface import t5 as t5
from smdistributed.modelparallel.torch.nn.huggingface import vit as vit
from smdistributed.modelparallel.torch.nn.registry import Registration, add_finder

_REGISTRATIONS: dict[str, Registration] = {
    name: registration
    for family in (bert, gpt2, gptj, gptneo, gptneox, llama, mistral, mixtral, qwen2, roberta, t5, vit)
    for name, registration in family.REGISTRATIONS.items()
}


def find(module_cls: type) -> Registration | None:
    """Return how modules of a class of transformers are replaced.

    Args:
        module_cls: The class.

    Returns:
        The registration, if there is one.
    """
    is_of_transformers = module_cls.__module__.startswith("transformers.models.")
    return _REGISTRATIONS.get(module_cls.__name__) if is_of_transformers else None


add_finder(find)
