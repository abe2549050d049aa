"""What ranks must have alike before they train together: models, packages and optimizers."""
