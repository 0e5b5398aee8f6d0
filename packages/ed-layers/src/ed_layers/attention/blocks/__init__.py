"""Attention blocks of decoders and encoders, from hidden states to hidden states."""
