data {
  int<lower=1> N;
  int<lower=1> F;
  matrix[N, F] x;
  vector[N] y;
  real<lower=0> scale;
  real<lower=0> noise_scale;
}
parameters {
  real<lower=0> noise;
  vector[F] weight;
  real bias;
}
model {
  noise ~ normal(0, noise_scale);
  weight ~ normal(0, scale);
  bias ~ normal(0, scale);
  y ~ normal(x * weight + bias, noise);
}
