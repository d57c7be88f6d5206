"""The models behind the stages: DFlash drafters and transformers targets."""
