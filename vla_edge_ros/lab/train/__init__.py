"""Training of the embedded default policy (needs the extra 'train')."""
