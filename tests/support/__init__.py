"""What tests share: trainers, models, published logs, servers, and ways to look at them."""
