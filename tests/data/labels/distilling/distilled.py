"""Small distillations, and the rows that they wrote."""

from draft_heads.data.labels.distill import distill
from draft_heads.data.labels.distill_options import DistillOptions
from draft_heads.data.labels.shards import load_distilled
from draft_heads.inference.answers import TargetAnswerer
from draft_heads.inference.target.target import Target


def run_distill(target, source, output, overwrite=False, chat_template=None, **options):
    """The manifest of a distillation, in small batches and shards, with the target in a folder."""
    loaded = Target.from_pretrained(target, chat_template=chat_template)
    options = DistillOptions(**{"batch_size": 4, "shard_rows": 4} | options)
    return distill(loaded, source, output, options, overwrite, False, TargetAnswerer.from_options(loaded, options))


def rows_of(output):
    return load_distilled(str(output)).dataset.to_list()
