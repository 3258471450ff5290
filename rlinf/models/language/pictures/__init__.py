"""Language models that read pictures, as trainers and references compute them."""
