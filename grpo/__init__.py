"""The GRPO algorithm: rollouts, advantages, the clipped loss, the update, and what is logged about them."""
