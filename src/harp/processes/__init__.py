"""Several processes that do one work: where each stands, who starts them, and what they tell each other."""
