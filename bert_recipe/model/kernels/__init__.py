"""Operations of attention and layers: positions; CPUs' length-bucketed attention, dropout and
packed linear layers.
"""
