"""Multi-turn episodes: conversations of the policy with environments, as token sequences."""
