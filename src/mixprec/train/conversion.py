"""The conversion of a model that a configuration asks for."""

from torch import nn

from mixprec import nn as layers
from mixprec.train.config import Config
from mixprec.train.recipe_choice import by_layer


def converted(model: nn.Module, config: Config) -> layers.Report:
    """Convert a model in place as a configuration asks; what was done."""
    options = config.convert
    return layers.convert(
        model,
        by_layer(model, config.recipe, config.base, options.keep_first, options.keep_last_share),
        skip=options.skip,
        include=options.include,
        multiple_of=options.multiple_of,
        keep_last=options.keep_last,
        impl=options.impl,
        seed=config.train.seed,
        cache_weights=options.cache_weights,
    )
