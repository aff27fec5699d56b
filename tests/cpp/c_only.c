/* Shows that the header is valid C. c_only BUNDLE prints eight tokens. */
#include <inttypes.h>
#include <skipdecode/skipdecode.h>
#include <stdio.h>

static int print_token(void* user, const skd_event* event) {
  (void)user;
  printf("%" PRId64 "\n", event->token);
  return 0;
}

static int failed(skd_status* status) {
  if (status == NULL) return 0;
  fprintf(stderr, "%s\n", skd_status_message(status));
  skd_status_destroy(status);
  return 1;
}

int main(int count, char** arguments) {
  const int64_t prompt[] = {5, 6, 7};
  const size_t lengths[] = {3};
  skd_bundle* bundle = NULL;
  skd_row_options options = skd_row_options_default();
  int result;
  if (count != 2 || failed(skd_bundle_load(arguments[1], NULL, &bundle))) return 2;
  options.max_new_tokens = 8;
  result = failed(skd_generate(bundle, prompt, lengths, 1, &options, 0, print_token, NULL));
  skd_bundle_destroy(bundle);
  return result;
}
