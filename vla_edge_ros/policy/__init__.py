"""From a picture and a sentence to a chunk of actions."""
