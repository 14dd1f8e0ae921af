"""Other packages' signatures over Tilewise's functions: one module for each, none imported unasked.

Each function takes the arguments of its namesake, calls ``tilewise.attention`` or ``attention_varlen``
once and returns what the namesake returns. What cannot be honoured is an ``UnsupportedError`` that names
the argument. Other errors are the core's and use its names: ``scale`` for softmax_scale, ``window[0]``
for window_size[0], ``sink`` for learnable_sink.
"""
