"""The embedded default: arithmetic problems that check themselves, and a tiny Qwen3 that half knows how to solve them."""
